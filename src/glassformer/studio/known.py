"""Names that a request may use: published models and the model that the studio was started with, but no other file."""

from __future__ import annotations

from collections.abc import Collection

from glassformer.errors import RequestError, did_you_mean, shown
from glassformer.names.grammar import CHANGES
from glassformer.names.known import FAMILIES, PACKAGED, PRESETS

LONGEST = 2000
"""Largest number of characters of an expression in a request."""


def name_of(expression: str) -> str:
    """Returns the text before the size and the changes of an expression."""
    return CHANGES.split(expression.strip())[0].partition("@")[0]


def check_name(expression: str, own: Collection[str] = ()) -> str:
    """Returns an expression whose name is a published model or one of `own`, which may be paths. Raises RequestError
    for the path of any other file: a page may not read files that the command line did not name."""
    expression = expression.strip()
    name = name_of(expression)
    if name in PRESETS or name in FAMILIES or name in PACKAGED:
        if not {"/", "\\"} & {*expression}:
            return expression
        raise RequestError(
            f"{shown(expression)}: a change of this page names no file", code="syntax", field="expression",
            value=shown(expression),
        )  # fmt: skip
    path = max((one for one in own if expression.startswith(one)), key=len, default="")
    if path and expression[len(path) : len(path) + 1] in ("", "+", "@"):
        return expression
    raise RequestError(
        f"no model is named {shown(name)}{did_you_mean(name, [*PRESETS, *FAMILIES])}; a file is opened by "
        "glassformer studio FILE",
        code="unknown", field="expression", value=shown(expression),
    )  # fmt: skip
