"""The published families as they can occur: for each, tiny random Hugging Face models with drawn shapes and options."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tests.conversion.cases.base import Case

CASES: dict[str, Case] = {
    name: import_module(f"{__name__}.{name}").CASE for _, name, _ in iter_modules(__path__) if name != "base"
}
TWO_TOWERS = frozenset({"t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian"})
"""Families whose models read a source text with an encoder."""
