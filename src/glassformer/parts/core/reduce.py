"""Sums over a batch that several processes share; in a single process the sum is the input.

A part calls `total(counts)`. The launcher of several processes enters `reducing(all_reduce)` around training; every
process then makes equal calls in equal order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from glassformer.parts.core.running import running, thread

Reduce = Callable[[Tensor], Tensor]
"""Function of a tensor x of this process; returns the sum of x over all processes, equal on each, without a
gradient."""


def total(x: Tensor) -> Tensor:
    """Returns the sum of x over the processes that share the batch; x itself in one process. x has no gradient."""
    reduce = thread.now.reduce
    return x if reduce is None else reduce(x)


def reducing(reduce: Reduce) -> AbstractContextManager[None]:
    """Makes `total` call `reduce` inside the context, in this thread."""
    return running(reduce=reduce)
