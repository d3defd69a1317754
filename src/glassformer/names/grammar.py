"""The grammar of expressions, without models: text in, pieces out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from glassformer.errors import LONGEST as SHOWN
from glassformer.errors import RequestError, shown
from glassformer.names.sizes import SIZES

LONGEST = 4096
CHANGES = re.compile(r"\+(?=[A-Za-z_])")
"""Separates changes. One starts with a letter, so `base=1e+6` is one change and paths may hold a plus."""

RECIPE = "recipe"
"""The first step of the path of a change that is about training."""


def parse(expression: str | Path, names_a_model: Callable[[str], bool]) -> tuple[str, str | None, list[str]]:
    """(name, size, changes). A leading path that exists is the name, unless `names_a_model` says that it is the name of
    a model: ./NAME is the folder. Raises RequestError for an empty name and for text that cannot be a change."""
    if not isinstance(expression, (str, Path)):
        raise RequestError(
            f"a model is named by text or a path, such as 'llama@10m', and not by {shown(expression)}",
            code="type", field="model", value=type(expression).__name__,
        )  # fmt: skip
    expression = str(expression).strip()
    if not expression:
        raise RequestError("an expression is empty; name a model such as llama@10m", code="missing", field="model")
    if len(expression) > LONGEST:
        raise RequestError(
            f"an expression has at most {LONGEST} characters, and this one has {len(expression):,}",
            code="range", field="model", value=len(expression),
        )  # fmt: skip
    path = _leading_path(expression, names_a_model)
    first, *changes = CHANGES.split(expression[len(path) :])
    name, at, size = first.partition("@")
    if at and not size:
        raise RequestError(
            f"{expression!r} has an @ without a size; use one of {', '.join(SIZES)}", code="missing", field="size"
        )
    if first.endswith("+"):
        raise RequestError(
            f"{expression!r} ends with a plus; a change follows it, such as +rope", code="missing", field="change"
        )
    if not path + name:
        raise RequestError(
            f"{expression[:SHOWN]!r} names no model; start with one, such as llama@10m", code="missing", field="name"
        )
    _, plus, rest = first.partition("+")
    if plus and (path or not looks_like_path(first)):
        raise RequestError(
            f"{'+' + rest[:SHOWN]!r} is not a change: one starts with a letter, such as +rope",
            code="syntax", field="change", value=rest[:SHOWN],
        )  # fmt: skip
    return path + name, size or None, changes


def _leading_path(expression: str, names_a_model: Callable[[str], bool]) -> str:
    """The longest leading piece that names a file or folder and no model, or nothing."""
    cuts = [len(expression), *(match.start() for match in re.finditer(r"[+@]", expression))]
    for cut in sorted(cuts, reverse=True):
        piece = expression[:cut]
        if piece and exists(piece) and looks_like_path(piece) and not names_a_model(piece):
            return piece
    return ""


def exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long, or not a valid path
        return False


def looks_like_path(name: str) -> bool:
    suffixes = {".yaml", ".yml", ".json", ".gguf"}
    return "/" in name or "\\" in name or Path(name).suffix in suffixes or (exists(name) and Path(name).is_dir())
