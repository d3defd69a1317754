"""Which of many cases the quick tests try: the others are slow ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def quickly(values: Iterable[Any], which: Callable[[int, Any], bool]) -> list[Any]:
    """All values for `parametrize`; those of which `which(i, value)` is false are slow."""
    return [value if which(i, value) else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]


def one_in(n: int) -> Callable[[int, Any], bool]:
    return lambda i, _: i % n == 0
