"""Proof that two commits differ in words only.

    python tools/words_only.py A B            docstrings and comments of Python files, and Markdown, may differ
    python tools/words_only.py --strings A B  string constants may differ too

Without B, the working tree is compared. Exit status 0 if nothing else differs; otherwise 1 and the names.
A comment that tools obey (noqa, type:, fmt:, pragma) counts as code.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

OBEYED = re.compile(r"#\s*(noqa|type:|fmt:|pragma|ruff:|mypy:|!)")


def git(*words: str) -> str:
    """Returns what git prints, run in the repository of the working folder."""
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def changed(a: str, b: str | None) -> Iterator[tuple[str, str]]:
    """Yields (status letter, path) of each file that differs; renames are a removal and an addition."""
    for line in git("diff", "--no-renames", "--name-status", a, *([b] if b else [])).splitlines():
        status, path = line.split("\t", 1)
        yield status, path


def content(commit: str | None, path: str) -> str:
    """Returns the text of a file in a commit, or in the working tree for None."""
    if commit is None:
        return (Path(git("rev-parse", "--show-toplevel").strip()) / path).read_text(encoding="utf-8")
    return git("show", f"{commit}:{path}")


class WithoutWords(ast.NodeTransformer):
    """Replaces docstrings, and other string constants if asked, by empty ones."""

    def __init__(self, strings: bool):
        self.strings = strings

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("") if self.strings and isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.generic_visit(node)
        if self.strings:  # words may move around the values, whose order counts
            node.values = [value for value in node.values if not isinstance(value, ast.Constant)]
        return node


def code_of(text: str, strings: bool = False) -> tuple[str, list[str]]:
    """Returns the syntax tree of a Python file without its words, and the comments that tools obey."""
    tree = WithoutWords(strings).visit(ast.parse(text))
    comments = [token.string for token in tokenize.generate_tokens(io.StringIO(text).readline)
                if token.type == tokenize.COMMENT and OBEYED.match(token.string)]  # fmt: skip
    return ast.dump(tree), comments


def differences(a: str, b: str | None, strings: bool) -> list[str]:
    """Returns the paths that differ in more than words."""
    found = []
    for status, path in changed(a, b):
        if path.endswith(".md"):
            continue
        same = status == "M" and path.endswith(".py")
        if not same or code_of(content(a, path), strings) != code_of(content(b, path), strings):
            found.append(path)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B", nargs="?")
    parser.add_argument("--strings", action="store_true")
    options = parser.parse_args()
    found = differences(options.a, options.b, options.strings)
    print(*found, sep="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
