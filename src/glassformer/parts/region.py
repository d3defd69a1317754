"""Elementwise bodies that `torch.compile` fuses into one loop, where that is switched on.

A region is a plain function of tensors. Eagerly it runs as it stands; inside `compiled_regions()` it is compiled at its
first call. Only such bodies are compiled: matrix products are at the machine's peak already, and small regions compile
in seconds, whatever the model around them looks like.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import update_wrapper
from typing import Any

import torch

from glassformer.parts.core.running import Eagerly, put, running, thread


def compiled_regions(on: bool = True) -> AbstractContextManager[None]:
    """Regions that this thread calls inside are compiled, for the shapes they see: for training steps, whose shapes do
    not change."""
    return running(compiles=on)


@contextmanager
def eager_regions() -> Iterator[Eagerly]:
    """Regions that this thread calls inside run as they stand, for who looks at what the model says of itself, even in
    `compiled_regions`; a warning then says so, once."""
    eagerly = thread.now.eagerly or Eagerly()
    eagerly.open += 1
    put(replace(thread.now, eagerly=eagerly))
    try:
        yield eagerly
    finally:  # contexts may be left in any order: the last one ends the stretch
        eagerly.open -= 1
        if not eagerly.open:
            put(replace(thread.now, eagerly=None))


def compiling_regions() -> bool:
    """Whether a region called now is compiled."""
    now = thread.now
    if now.compiles and now.eagerly is not None and now.eagerly.first("regions"):
        warnings.warn("the elementwise regions of this model are compiled; looked at or edited, they run eagerly")
    return now.compiles and now.eagerly is None


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
        if torch.compiler.is_compiling() or not thread.now.compiles or not compiling_regions():
            return self.body(*args)
        if self.fused is None:
            # Not `fullgraph`: past torch's limit of shapes a body must run eagerly, not fail.
            self.fused = torch.compile(self.body, dynamic=False)
        return self.fused(*args)
