"""The command line, or the call in Python, that repeats a comparison."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glassformer.comparison.request import recipe_defaults
from glassformer.parts.core.base import PartConfig, to_plain
from glassformer.training import Recipe

OPTIONS = {
    "tokens": "--tokens", "flops": "--flops", "minutes": "--minutes", "match": "--match", "seeds": "--seeds",
    "tokenizer": "--tokenizer", "batch_size": "--batch-size", "context": "--context", "learning_rate": "--lr",
    "optimizer": "--optimizer", "objective": "--objective", "device": "--device", "dtype": "--dtype",
    "threads": "--threads", "watch": "--watch-every", "on_spike": "--on-spike",
    "power": "--power", "looks": "--looks", "out": "--out",
}  # fmt: skip
FLAGS = {
    "compile": {True: "--compile", False: "--no-compile"},
    "allow_unmatched": {True: "--allow-unmatched"},
    "pretrained": {True: "--pretrained"},
}


def command_of(expressions: Sequence[str], data: object, fields: dict[str, Any], **always: Any) -> str:
    """The command with these keywords, without those of `fields` that have their default value. It is a call in Python
    if the command line has no option for a keyword, or none that says its value, or if `data` is text in memory."""
    usual = {
        **recipe_defaults(),
        "tokenizer": "auto",
        "allow_unmatched": False,
        "pretrained": False,
        "power": None,
        "looks": [],
    }
    typed = {name: _part(name, value, usual.get(name)) for name, value in fields.items()}
    given = {name: value for name, value in typed.items() if value != usual.get(name)} | always
    named = isinstance(data, str | Path)
    options = [_option(name, value) for name, value in given.items()]
    if named and None not in options:
        words = ["glassformer", "compare", *expressions, "--data", str(data)]
        return shlex.join(words + [word for option in options for word in option or ()])
    keywords = [f"{name}={to_plain(value)!r}" for name, value in given.items()]
    call = f"gf.compare({', '.join([repr(list(expressions)), repr(str(data)) if named else 'data', *keywords])})"
    told = "" if named else f"  # data: {getattr(data, 'name', 'text')}, as it was prepared"
    return f"import glassformer as gf; {call}{told}"


def _part(name: str, value: Any, usual: object) -> Any:
    """The value; a part of the recipe, which may be given as its kind or as a tree, as its config."""
    return getattr(Recipe.of(tokens=1, **{name: value}), name) if isinstance(usual, PartConfig) else value


def _option(name: str, value: Any) -> list[str] | None:
    """The words of an option; None where the command line has none for this value."""
    if name in FLAGS:
        return [FLAGS[name][value]]
    if name not in OPTIONS:
        return None
    if name == "looks":
        return [OPTIONS[name], ",".join(map(str, value))]
    if not isinstance(value, PartConfig):
        return [OPTIONS[name], str(value)]
    fields, changed = getattr(value, "values", ()), value.model_dump(exclude_defaults=True)
    count = max((i + 1 for i, field in enumerate(fields) if field in changed), default=0)
    said = ":".join([value.kind, *(str(getattr(value, field)) for field in fields[:count])])
    return [OPTIONS[name], said] if _part(name, said, value) == value else None
