"""The command line, or the call in Python, that repeats a comparison."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glassformer.comparison.request import recipe_defaults
from glassformer.parts.base import to_plain

OPTIONS = {
    "tokens": "--tokens", "flops": "--flops", "minutes": "--minutes", "match": "--match", "seeds": "--seeds",
    "tokenizer": "--tokenizer", "batch_size": "--batch-size", "context": "--context", "learning_rate": "--lr",
    "device": "--device", "dtype": "--dtype", "threads": "--threads", "watch": "--watch-every",
    "on_spike": "--on-spike", "out": "--out",
}  # fmt: skip
FLAGS = {
    "compile": {True: "--compile", False: "--no-compile"},
    "allow_unmatched": {True: "--allow-unmatched"},
}


def command_of(expressions: Sequence[str], data: object, fields: dict[str, Any], **always: Any) -> str:
    """The command with these keywords, without those of `fields` that have their default value. It is a call in Python
    if a keyword has no option on the command line, or if `data` is text in memory."""
    usual = {**recipe_defaults(), "tokenizer": "auto", "allow_unmatched": False}
    given = {name: value for name, value in fields.items() if value != usual.get(name)} | always
    named = isinstance(data, str | Path)
    if named and given.keys() <= OPTIONS.keys() | FLAGS.keys():
        words = ["glassformer", "compare", *expressions, "--data", str(data)]
        for name, value in given.items():
            words += [OPTIONS[name], str(value)] if name in OPTIONS else [FLAGS[name][value]]
        return shlex.join(words)
    keywords = [f"{name}={to_plain(value)!r}" for name, value in given.items()]
    call = f"gf.compare({', '.join([repr(list(expressions)), repr(str(data)) if named else 'data', *keywords])})"
    told = "" if named else f"  # data: {getattr(data, 'name', 'text')}, as it was prepared"
    return f"import glassformer as gf; {call}{told}"
