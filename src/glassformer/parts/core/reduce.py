"""Statistics of a batch that several processes share: summed by one function, which is local by default.

A part writes `total(counts)`. Whoever runs several processes enters `reducing(all_reduce)` around training; every
process then makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from glassformer.parts.core.running import running, thread

Reduce = Callable[[Tensor], Tensor]
"""x of this process -> the sum of all processes' x, the same on each; without a gradient."""


def total(x: Tensor) -> Tensor:
    """The sum of x over the processes that share the batch; x itself in one process. x has no gradient."""
    reduce = thread.now.reduce
    return x if reduce is None else reduce(x)


def reducing(reduce: Reduce) -> AbstractContextManager[None]:
    """Inside, in this thread, `total` is `reduce`."""
    return running(reduce=reduce)
