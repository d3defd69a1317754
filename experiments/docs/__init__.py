"""The pages of docs/readings and docs/statistics: words from the docstrings and pages.md, figures from real runs.

>>> python -m experiments.docs                     # all of them, and the index docs/under_glass.md
>>> python -m experiments.docs token_cosine        # one
>>> python -m experiments.docs norm                # docs/parts/norm: a page for each kind of an axis
>>> python -m experiments.docs guides              # docs/guides.md, from the tables of guides
>>> python -m experiments.docs dynamics            # docs/dynamics.md, from measured claims
>>> python -m experiments.docs tutorials           # docs/tutorials, from examples/tutorials
>>> python -m experiments.docs reference           # docs/reference, from the verbs, the functions and the files
>>> python -m experiments.docs --words             # after a docstring changed: what was measured stays

A function that is public in `glassformer.lens` or `glassformer.dynamics` has a page: a heading in pages.md, or its name
after `also:` below another's. Every number on a page is measured when it is written.
"""

from __future__ import annotations

import html
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from doctest import DocTestParser
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from glassformer import dynamics, lens
from glassformer.dynamics.watch import DENSE, RING
from glassformer.lens.registry import READINGS
from glassformer.names.explained import glossary

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
ROOMS: dict[str, ModuleType] = {"readings": lens, "statistics": dynamics}
BEGIN, END = "<!-- measured -->", "<!-- up to here -->"
TROUBLE = "Trouble:"
HEADING = "## What trouble looks like"
GENERATED = "<!-- `make docs` writes this page from docstrings, experiments/docs/pages.md and measurements. -->"


OWN_PARTS = DOCS / "own-parts.md"
"""Page with the files of examples/parts."""


def with_files(text: str) -> str:
    """Returns a page with the code of each file that it names in a comment, in the block below the comment."""

    def block(match: re.Match[str]) -> str:
        return f"{match[0].splitlines()[0]}\n```python\n{(DOCS.parent / match[1]).read_text(encoding='utf-8')}```\n"

    return re.sub(r"<!-- (\S+\.py) -->\n(?:```python\n.*?```\n)?", block, text, flags=re.DOTALL)


@dataclass
class Page:
    """One heading of pages.md."""

    room: str
    name: str
    what: str = ""
    """Description of a few words, for the index."""
    also: list[str] = field(default_factory=list)
    """Other functions documented on this page."""
    recorded: list[str] = field(default_factory=list)
    """Names under which `--watch` records the statistic."""
    words: str = ""
    """Hand-written sections, in Markdown."""

    @property
    def path(self) -> Path:
        return DOCS / self.room / f"{self.name}.md"

    @property
    def figure(self) -> Path:
        return DOCS / "figures" / self.room / f"{self.name}.png"


@cache
def pages() -> dict[str, Page]:
    """Returns {name: page}, in the order of pages.md."""
    found: dict[str, Page] = {}
    room = ""
    for line in (HERE / "pages.md").read_text(encoding="utf-8").splitlines(keepends=True):
        page = next(reversed(found.values()), None)
        if line.startswith("# "):
            room = line[2:].strip()
        elif line.startswith("## "):
            name = line[3:].strip()
            found[name] = Page(room, name)
        elif page and not page.words and (given := re.fullmatch(r"(what|also|recorded): (.*)\n", line)):
            value = given[2] if given[1] == "what" else given[2].split(", ")
            setattr(page, given[1], value)
        elif page and (page.words or line.strip()):
            page.words += line
    return found


def public(room: str) -> dict[str, Callable[..., Any]]:
    """Returns the public functions of a room, by name."""
    named = {name: getattr(ROOMS[room], name) for name in ROOMS[room].__all__}
    return {name: one for name, one in named.items() if inspect.isfunction(one)}


# Words


def markdown_of(function: Any) -> list[str]:
    """Returns a docstring as blocks of Markdown: paragraphs, and code blocks for lines indented or set in columns."""
    blocks = []
    for block in re.split(r"\n\s*\n", inspect.getdoc(function) or ""):
        as_set = block.startswith((" ", ">>>")) or re.search(r"\S {2,}\S", block)
        blocks.append(f"```\n{inspect.cleandoc(block)}\n```" if as_set else plainly(block))
    return blocks


def plainly(paragraph: str) -> str:
    """Returns the paragraph with Markdown's special characters escaped, except in backticks."""
    pieces = re.split(r"(`[^`]*`)", paragraph)
    return "".join(piece if piece.startswith("`") else escaped(piece) for piece in pieces)


def escaped(words: str) -> str:
    return re.sub(r"([\\_*|\[\]])", r"\\\1", html.escape(words, quote=False))


def signature(function: Callable[..., Any]) -> str:
    """Returns the call of a function with annotations and defaults."""
    given = inspect.signature(function)
    arguments = [argument(one) for one in given.parameters.values()]
    returns = f" -> {given.return_annotation}".replace("'", '"') if given.return_annotation is not given.empty else ""
    room = function.__module__.split(".")[1]
    return call(f"gf.{room}.{function.__name__}", arguments) + returns


def call(name: str, arguments: list[str]) -> str:
    """Returns `name(arguments)`, with a line for each argument if one line is too long."""
    line = f"{name}({', '.join(arguments)})"
    body = "".join(f"    {one},\n" for one in arguments)
    return line if len(line) <= 90 else f"{name}(\n{body})"


def argument(one: inspect.Parameter) -> str:
    star = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
    annotation = f": {one.annotation}" if one.annotation is not one.empty else ""
    default = f" = {one.default!r}" if one.default is not one.empty and not callable(one.default) else ""
    return f"{star}{one.name}{annotation}{default}".replace("'", '"')


def written(page: Page, measured: str) -> str:
    """Returns the whole page; `measured` is the text below its figure."""
    function = public(page.room)[page.name]
    told = markdown_of(function)
    about = markdown_of(sys.modules[function.__module__]) if page.room == "readings" else []
    trouble = [block.removeprefix(TROUBLE).strip() for block in told if block.startswith(TROUBLE)]
    trouble = [block[0].upper() + block[1:] for block in trouble]
    source = f"src/{function.__module__.replace('.', '/')}.py"
    pieces = [
        GENERATED,
        f"# {page.name}",
        f"*{page.what[0].upper()}{page.what[1:]}.*",
        f"![{page.name}](../figures/{page.room}/{page.name}.png)",
        f"{BEGIN}\n\n{measured}\n\n{END}",
        f"```python\n{signature(function)}\n```",
        *about,
        *(block for block in told if not block.startswith(TROUBLE)),
        page.words.strip().replace("### ", "## ").replace(HEADING, "\n\n".join([HEADING, *trouble])),
    ]
    if page.also:
        pieces.append("## Related functions")
        for name in page.also:
            other = public(page.room)[name]
            pieces.append(f"```python\n{signature(other)}\n```")
            pieces += markdown_of(other)
    if page.recorded:
        kept = ", ".join(f"`{name}`" for name in page.recorded)
        pieces.append(f"A run trained with `--watch` records it in `dynamics.jsonl` as {kept}.")
    pieces.append(f"[Under glass](../under_glass.md) · [{source}](../../{source})")
    return "\n\n".join(pieces) + "\n"


def measured_before(page: Page) -> str:
    """Returns the measured text of the page's file."""
    return page.path.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def glossary_page() -> str:
    """Returns the text of docs/glossary.md."""
    pieces = [
        "# Glossary",
        "The words of this project, each with one meaning. They are the field's words, if it has any; symbols of "
        "shapes are in\n[shapes](shapes.md). `glassformer explain WORD` prints them too; this page is made from "
        "`src/glassformer/names/glossary.yaml`.",
    ]
    for section, held in glossary().items():
        rows = "\n".join(f"| {term} | {meaning} |" for term, meaning in held.items())
        pieces += [f"## {section}", f"| term | meaning |\n|---|---|\n{rows}"]
    return "\n\n".join(pieces) + "\n"


def index() -> str:
    """Returns the text of docs/under_glass.md."""
    lines = [
        GENERATED,
        "# Under glass",
        "How to look inside a model, and how to find out why a training run failed. A *reading* is a function of a "
        "model and a text that returns data with a figure; a *statistic* is a function of tensors that a watched run "
        "records.",
        '```python\nimport torch\n\nimport glassformer as gf\n\nloaded = gf.load("smollm2")\n'
        'tokens = torch.tensor([loaded.tokenizer.encode("When Mary and John went to the store,")])\n'
        "reading = gf.lens.logit_lens(loaded.model, tokens, tokenizer=loaded.tokenizer)\n"
        "print(reading)  # in words\n"
        'reading.save("lens.png")  # as a figure; a notebook shows it by itself\n'
        "reading.to_dict()  # as plain JSON\n```",
        "## Readings",
        '`glassformer inspect EXPR --text "..." --reading NAME --out DIR` prints one and draws DIR/NAME.png '
        "(several, or `all`): " + ", ".join(f"`{name}`" for name in READINGS) + ". "
        "`--ablate layers.18.heads.6` (or `layers.18`, `layers.18.mixer`, `layers.18.ffn`, `.neurons.7`, `.experts.0`) "
        "removes a component of the model while it reads.",
        "| reading | shows |\n|---|---|\n" + rows("readings"),
        "## Statistics",
        "`glassformer train ... --watch` records them; `glassformer why RUN` reads the record. An alarm is a "
        "combination of them, never one number: entropy, rank and cosine all move in healthy training.",
        "| statistic | shows | recorded as |\n|---|---|---|\n" + rows("statistics"),
        "## In another training loop",
        "`glassformer train --watch` calls a `gf.dynamics.Watch` around every step of the optimizer; so can a loop "
        "written by hand. `Records` writes the record for `glassformer why`, and `gf.why(run)` returns the same "
        "diagnosis as a value.",
        "```python\nimport math\nfrom pathlib import Path\n\nimport torch\n\nimport glassformer as gf\n\n"
        + "".join(example.source for example in DocTestParser().get_examples(dynamics.Watch.__doc__ or ""))
        + "```",
        f"`weight_norm`, `gradient_norm` and `gradient_rms` of the last {RING} steps are kept. At a spike they are "
        f"written, and all statistics of the spike's step and of the {DENSE} steps after it are recorded. All other "
        "statistics (activations, update ratios, spectra) cost a pass or a copy of the weights. *Before* a spike they "
        "are recorded only at the interval, so that the first change that `why` names is exact to the interval, and "
        "exact to the step for the three norms.",
    ]
    return "\n\n".join(lines) + "\n"


def rows(room: str) -> str:
    made = []
    for page in pages().values():
        if page.room == room:
            cells = [f"[{page.name}]({room}/{page.name}.md)", page.what]
            if room == "statistics":
                cells.append(", ".join(f"`{name}`" for name in page.recorded))
            made.append("| " + " | ".join(cells) + " |")
    return "\n".join(made)
