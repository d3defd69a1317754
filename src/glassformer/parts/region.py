"""Regions: elementwise functions that `torch.compile` fuses into one loop, if that is switched on.

A region is a plain function of tensors. By default it runs eagerly; inside `compiled_regions()` it is compiled at its
first call. Only such functions are compiled: matmuls are at the machine's peak already, and small regions compile in
seconds, for any model around them.
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
    """Returns a context manager in which the regions that this thread calls are compiled, for each of their shapes: for
    training steps, whose shapes do not change."""
    return running(compiles=on)


@contextmanager
def eager_regions() -> Iterator[Eagerly]:
    """Context manager in which the regions of this thread run eagerly, even inside `compiled_regions`, so that the
    model can be observed; a warning then reports it, once."""
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
    """Returns True if a region (fused elementwise function) that is called now is compiled."""
    now = thread.now
    if now.compiles and now.eagerly is not None and now.eagerly.first("regions"):
        warnings.warn(
            "the elementwise regions of this model are compiled; while it is observed or edited, they run eagerly"
        )
    return now.compiles and now.eagerly is None


def forget_compiled() -> None:
    """Discards everything that torch's compiler has compiled, because it keeps only a few shapes of each region and
    runs further shapes eagerly."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


class region:
    """Decorator that makes a function of tensors a region: `@region def f(...)`. Called while an outer function is
    compiled, it is part of that graph."""

    def __init__(self, body: Callable[..., Any]):
        self.body = body
        self.fused: Callable[..., Any] | None = None
        update_wrapper(self, body)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or not thread.now.compiles or not compiling_regions():
            return self.body(*args)
        if self.fused is None:
            # not `fullgraph`: past torch's limit of shapes a region must run eagerly, not fail
            self.fused = torch.compile(self.body, dynamic=False)
        return self.fused(*args)
