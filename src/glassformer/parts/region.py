"""Elementwise bodies that `torch.compile` fuses into one loop, where that is switched on.

A region is a plain function of tensors. Eagerly it runs as it stands; inside `compiled_regions()` it is compiled at its
first call. Only such bodies are compiled: matrix products are at the machine's peak already, and small regions compile
in seconds, whatever the model around them looks like.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch

_compile = False
_looked_at = 0
"""How many look at or edit what runs now."""
_said = False


@contextmanager
def compiled_regions(on: bool = True) -> Iterator[None]:
    """Regions called inside are compiled, for the shapes they see: for training steps, whose shapes do not change."""
    global _compile
    before, _compile = _compile, on
    try:
        yield
    finally:
        _compile = before


@contextmanager
def eager_regions() -> Iterator[None]:
    """Regions called inside run as they stand, for who looks at what the model says of itself, even in
    `compiled_regions`; which then is said, once."""
    global _looked_at, _said
    _looked_at += 1
    try:
        yield
    finally:
        _looked_at -= 1
        _said = _said and bool(_looked_at)


def compiling_regions() -> bool:
    """Whether a region called now is compiled."""
    global _said
    if _compile and _looked_at and not _said:
        _said = True
        warnings.warn("the elementwise regions of this model are compiled; looked at or edited, they run eagerly")
    return _compile and not _looked_at


def forget_compiled() -> None:
    """The next region called is compiled anew: torch keeps a few shapes of each, and leaves any more eager."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


class region:
    """Decorator: `@region def f(...)`. Called while somebody else compiles, it is part of their graph."""

    def __init__(self, body: Callable[..., Any]):
        self.body = body
        self.fused: Callable[..., Any] | None = None
        update_wrapper(self, body)

    def __call__(self, *args: Any) -> Any:
        if not _compile or torch.compiler.is_compiling() or not compiling_regions():
            return self.body(*args)
        if self.fused is None:
            # Not `fullgraph`: past torch's limit of shapes a body must run eagerly, not fail.
            self.fused = torch.compile(self.body, dynamic=False)
        return self.fused(*args)
