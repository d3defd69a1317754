"""Imports between the files of this repository, read from their text.

`tests/test_house.py` checks the house by them, and `tools/changed.py` follows them from a changed file to its tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import glassformer

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "glassformer"
TOPS = {"glassformer": SRC, **{name: ROOT / name for name in ("benchmarks", "experiments", "tests", "tools")}}
"""Packages by their names."""
COMPUTED = "glassformer.<computed>"
"""An import whose name no reader knows."""


@cache
def walk(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Returns all nodes of a tree, which several checks look through."""
    return tuple(ast.walk(tree))


@cache
def parsed(path: Path) -> ast.Module:
    """Returns the tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(node: ast.AST) -> str:
    """Returns `a.b.c` as it is written, with nothing before the first dot where an expression is."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(path: Path, tree: ast.AST, top: Path | None = None) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of all that a file imports, at its top or in a function, also by a name in a string,
    and of what it reaches through the package itself (`import glassformer as gf; gf.train`); relative names resolved.
    `top` is the folder of the package that holds the file."""
    top = top or next(folder for folder in TOPS.values() if path.is_relative_to(folder))
    package = [top.name, *path.relative_to(top).parts[:-1]]
    whole = set()  # what the file calls the package
    for node in walk(tree):
        if isinstance(node, ast.Import):
            whole |= {alias.asname or alias.name for alias in node.names if alias.name == "glassformer"}
    for node in walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            given = node.args[0] if node.args else None
            yield node.lineno, str(given.value) if isinstance(given, ast.Constant) else COMPUTED
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in whole:
            yield node.lineno, f"glassformer.{glassformer._HOMES.get(node.attr, node.attr)}.{node.attr}"


def file_of(name: str, tops: Mapping[str, Path] = TOPS) -> Path | None:
    """Returns the file that a dotted name leads to, of the module itself or of what it is taken from."""
    steps = name.split(".")
    while steps and steps[0] in tops:
        place = tops[steps[0]].joinpath(*steps[1:])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file
        steps.pop()
    return None


def files_used(path: Path, top: Path) -> Iterator[Path]:
    """Yields the files below `top` that a file there imports, in functions and for type checkers too."""
    for _, name in imported(path, parsed(path), top):
        if (file := file_of(name, {top.name: top})) is not None:
            yield file
