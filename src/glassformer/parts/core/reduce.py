"""Statistics of a batch that several processes share: summed by one function, which is local by default.

A part writes `total(counts)`. Whoever runs several processes enters `reducing(all_reduce)` around training; every
process then makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""x of this process -> the sum of all processes' x, the same on each; without a gradient."""


def alone(x: Tensor) -> Tensor:
    """The sum over one process."""
    return x


_reduce: Reduce = alone  # of all threads: a recomputed forward may run in one of autograd's


def total(x: Tensor) -> Tensor:
    """The sum of x over the processes that share the batch; x itself in one process. x has no gradient."""
    return _reduce(x)


@contextmanager
def reducing(reduce: Reduce) -> Iterator[None]:
    """Inside, `total` is `reduce`."""
    global _reduce
    before, _reduce = _reduce, reduce
    try:
        yield
    finally:
        _reduce = before
