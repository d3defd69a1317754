"""Counts of phrases that make a reader read twice, per file, against a baseline that may only fall.

    python tools/words.py                prints each phrase that exceeds its file's baseline, with line and plain form
    python tools/words.py --all [FILE]   prints every phrase
    python tools/words.py --lower        lowers the baseline to what the files now have
    python tools/words.py --move OLD NEW adds the baseline of OLD to that of NEW, after a file was moved or merged

Docstrings, comments and sentences in string constants are counted in Python files, all prose in Markdown files written
by hand. A file without an entry in the baseline must have none. `tests/test_words.py` runs the first form.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASELINE = ROOT / "tests" / "words_baseline.json"
FOLDERS = ("src", "tests", "benchmarks", "experiments", "tools", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
GENERATED = (
    "docs/parts/", "docs/readings/", "docs/statistics/", "docs/kinds/", "docs/claims/", "docs/example/",
    "docs/benchmarks/", "docs/advice.md", "docs/claims.md", "docs/log/", "docs/decisions.md", "docs/reference/",
    "docs/howto/index.md", "docs/mixers.md", "docs/papers.md", "docs/planning.md", "docs/guides/", "docs/zh/",
)  # fmt: skip
"""Paths that other files generate, and notebooks that keep the words of their day."""
OWN = ("tools/words.py", "tests/test_words.py")
"""Files that quote the phrases."""

PATTERNS = {
    "what": (r"(What|Which|Where|Who|Those|They|That|These|The same|So many|As)\b", "a noun or a verb"),
    "of": (r"(Of|On|In the place|By how much)\b", "the name of the quantity"),
    "whether": (r"Whether\b", "Returns True if"),
    "where-it": (r"\bwhere (there|it|they|that|nothing|none|one|no|this|all|any)\b", "if, when"),
    "begin": (r"\bbeg(in|ins|an|un|inning)\b", "start, initial"),
    "so-many": (r"\bso many\b|\bas many\b", "n, at most n"),
    "alone": (r"\w+ alone\b", "only"),
    "none-colon": (r"\bNone: ", "If None,"),
    "own": (r"\b(of|on) (its|their|your|our) own\b", "separate, own X"),
    "stand": (r"\bst(ands?|ood|anding)\b", "is, precedes, appears"),
    "none": (r"\b(is|are|has|names) none\b|\bnone (is|are)\b", "no X, without"),
    "lie": (r"\b(lies?|lay)\b(?! between)", "is stored, is"),
    "is-no": (r"\b(is|are) no [a-z]+", "is not a"),
    "of-which": (r"\b(of|from|by|without) which\b", "a sentence of two"),
    "go-on": (r"\bg(o|oes|oing|one) on\b|\bwrit\w+ on\b", "continue, resume, generate"),
    "nobody": (r"\b(nobody|somebody|whoever|anybody)\b", "the name of the component"),
    "beside": (r"(?<!## )\bbeside\b(?!:)", "next to, against, with"),  # not the short name in a heading or `beside:...`
    "said": (r"\b(is|are) said\b|\bsays? so\b", "is reported"),
    "look": (r"\b(who|that) looks?\b|\blook(s|ed)? at\b", "observer, attends to"),
    "mean": (r"\bin the mean\b|\bof late\b|\bmeanwhile\b|\ball the same\b|\bbesides\b", "on average, recently, also"),
    "there": (r"\bthat is there\b|\bthose there are\b|\bis not there\b|\bwhat is there\b", "existing, missing"),
    "told": (r"\btold\b", "printed, given"),
    "anew": (r"\banew\b|\bbroken off\b", "again, new, interrupted"),
    "likeliest": (r"\blikeliest\b", "most likely"),
    "come-to": (r"\bcomes? to\b", "totals, reaches"),
    "both-ways": (r"\bboth ways\b|\bto both sides\b", "bidirectional"),
    "heads-of-keys": (r"\bheads? of keys\b|\bkey heads?\b", "KV heads"),
    "right": (r"\b(is|are) right\b", "must be"),
    "stranger": (r"\bstrangers?\b|\blets? through\b|\bhands on\b", "untrusted, pass"),
}
"""Name of each pattern -> pattern, plain form."""
OPENERS = {"what": True, "of": True, "whether": False}
"""Patterns that count only at the start of a docstring -> True if of any docstring, False if of functions only."""
PHRASES = {name: pattern for name, (pattern, _) in PATTERNS.items() if name not in OPENERS}
ANY = re.compile("|".join(PHRASES.values()), re.IGNORECASE)
"""Pattern of a text with any phrase."""


def is_function(node: ast.AST) -> bool:
    """Returns True if the node defines a function or a method that is no property."""
    plain = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return plain and not any("property" in ast.unparse(mark) for mark in getattr(node, "decorator_list", ()))


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.Constant, bool]]:
    """Yields each docstring, of attributes too, and True beside those of functions."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for index, inner in enumerate(body if isinstance(body, list) else []):
            if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant) and type(inner.value.value) is str:
                yield inner.value, index == 0 and is_function(node)


STRING_OR_COMMENT = re.compile(
    r"""\"\"\"(?:\\.|[^\\])*?\"\"\"|'''(?:\\.|[^\\])*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(\#[^\n]*)""",
    re.DOTALL,
)
"""Pattern of the tokens of Python in which a comment sign may be; ten times faster than `tokenize`."""


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, comment with its sign) for each comment of a Python file."""
    line, start = 1, 0
    for match in STRING_OR_COMMENT.finditer(text):
        if match[1]:
            line, start = line + text.count("\n", start, match.start()), match.start()
            yield line, match[1]


def prose_of_python(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields (line, prose, kind) for each docstring, comment and sentence in a constant; kind is "function", "doc",
    "comment" or "string"."""
    tree = ast.parse(text)
    documents = {id(node): function for node, function in docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in documents:
                yield node.lineno, node.value, "function" if documents[id(node)] else "doc"
            elif " " in node.value.strip():
                yield node.lineno, node.value, "string"
    for line, comment in comments(text):
        yield line, comment.lstrip("#! "), "comment"


def prose_of_markdown(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields (line, prose, "text") for each line outside fenced code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line, "text"


def phrases(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yields (line, words found, name of the pattern) for each phrase in a file."""
    text = path.read_text(encoding="utf-8")
    for line, prose, kind in (prose_of_python if path.suffix == ".py" else prose_of_markdown)(text):
        for name, any_docstring in OPENERS.items():
            counted = kind == "function" or (any_docstring and kind == "doc")
            if counted and (match := re.match(PATTERNS[name][0], prose.lstrip())):
                yield line, match[0], name
        for name, pattern in PHRASES.items() if ANY.search(prose) else ():
            for match in re.finditer(pattern, prose, re.IGNORECASE):
                yield line + prose.count("\n", 0, match.start()), match[0], name


def files() -> list[str]:
    """Returns the files that are checked, as paths from the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *FOLDERS],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    prose = [name for name in listed if name.endswith((".py", ".md")) and not name.startswith((*GENERATED, *OWN))]
    return sorted(name for name in set(prose) if (ROOT / name).is_file())


def counts() -> dict[str, dict[str, int]]:
    """Returns, for each file that has any, the number of matches of each pattern."""
    found = {name: Counter(pattern for _, _, pattern in phrases(ROOT / name)) for name in files()}
    return {name: dict(sorted(counter.items())) for name, counter in found.items() if counter}


def baseline() -> dict[str, dict[str, int]]:
    """Returns the counts that may not be exceeded, by file and pattern."""
    return json.loads(BASELINE.read_text(encoding="utf-8"))


def write(table: dict[str, dict[str, int]]) -> None:
    """Writes the baseline, a line for each file."""
    rows = [f"  {json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in sorted(table.items()) if row]
    BASELINE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def excesses() -> list[str]:
    """Returns a line for each file and pattern with more matches than its baseline."""
    allowed, lines = baseline(), []
    for file, row in counts().items():
        for name, count in row.items():
            most = allowed.get(file, {}).get(name, 0)
            if count > most:
                places = [f"line {line} {words!r}" for line, words, other in phrases(ROOT / file) if other == name]
                lines.append(f"{file}: {count} for {most}: {', '.join(places)}; write: {PATTERNS[name][1]}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", nargs="*", metavar="FILE")
    parser.add_argument("--lower", action="store_true")
    parser.add_argument("--move", nargs=2, metavar=("OLD", "NEW"))
    options = parser.parse_args()
    if options.move:
        table = baseline()
        old, new = options.move
        table[new] = dict(Counter(table.get(new, {})) + Counter(table.pop(old)))
        write(table)
    elif options.lower:
        now = counts()
        write({name: dict(Counter(row) & Counter(now.get(name, {}))) for name, row in baseline().items()})
    elif options.all is not None:
        for name in options.all or files():
            for line, words, _ in phrases(ROOT / name):
                print(f"{name}:{line}: {words}")
    else:
        lines = excesses()
        print(*lines, sep="\n" if lines else "")
        return bool(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
