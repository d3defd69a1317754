"""Setting of values by path in a config, written as nested dicts and lists (a "plain tree")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glassformer.errors import RequestError, did_you_mean
from glassformer.parts.core.base import WORDS, of_kind


def set_value(tree: Any, steps: Sequence[str], value: str, path: str, also: Sequence[str] = ()) -> None:
    """Sets a value in a config of nested dicts and lists, in place: the one at the path `steps`, to what the text
    `value` represents. Setting the `kind` of a part keeps the fields that the old and the new kind have. `path` is
    the user's text, for messages; `also` are other valid first steps. Raises RequestError for a path that the tree
    lacks."""
    *way, last = steps
    known = also
    for step in way:
        tree = tree[_key(tree, step, path, known)]
        if tree is None:
            raise RequestError(
                f"{path}={value}: there is no {step} here to change; add it first{_adding(step)}",
                code="missing", field=path, value=value,
            )  # fmt: skip
        known = ()
    key, new = _key(tree, last, path, known), read_value(value)
    if key == "kind" and isinstance(new, str):
        part = of_kind(tree, new)
        tree.clear()
        tree.update(part)
    else:
        tree[key] = new


def _adding(step: str) -> str:
    """Returns the end of a sentence with the short names, such as `+qk_norm`, that add the part named `step`; empty if
    no short name does."""
    some = [str(word) for word, part in WORDS.values() if step in (word.change, part.axis.rpartition("_")[2])]
    return f", such as {', '.join(f'+{word}' for word in some[:4])}" if some else ""


def _key(tree: Any, step: str, path: str, also: Sequence[str]) -> Any:
    if isinstance(tree, list):
        if not step.isdecimal() or int(step) >= len(tree):
            raise RequestError(
                f"{path}: {step} is not an index below {len(tree)}", code="range", field=path, value=step
            )
        return int(step)
    if not isinstance(tree, dict):
        raise RequestError(f"{path}: {step!r} asks for a field of a plain value", code="type", field=path, value=step)
    if step not in tree:
        near = did_you_mean(step, [*tree, *also])
        raise RequestError(
            f"{path}: no field is named {step!r}{near or '; known here: ' + ', '.join(tree)}",
            code="unknown", field=path, value=step,
        )  # fmt: skip
    return step


def read_value(text: str) -> Any:
    """Returns the value that a text represents: a number, true, false, none, a list [..] of these, or the text
    itself."""
    if text.startswith("[") and text.endswith("]"):
        return [read_value(one.strip()) for one in text[1:-1].split(",")] if text[1:-1].strip() else []
    if text.lower() in ("none", "null"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text
