"""Sums whose bits do not depend on the number of processes.

A step's gradient is the sum of its atoms' gradients, microbatches of a fixed size. They are summed as a binary tree,
((0 + 1) + (2 + 3)) + ..., whose lower levels are within the ranks of one round and whose upper ones over the rounds: a
power of two of ranks that divides the atoms cuts the tree between two levels, and every partial sum is unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from glassformer.parts.precision import exact, exact_device

T = TypeVar("T")

LONGEST = 1 << 14
"""Most elements of a row that are summed in one operation: torch divides the sum of a single longer row among its
threads."""
VALUES_PER_BLOCK = 1 << 17
"""Number of a gradient's elements that are converted to fp64 at once: a block stays in the processor's cache."""

ON_CPU, ON_GPU = 1 << 21, 1 << 24
"""Most elements of a bucket in the reduction between copies of the weights: on a CPU they fit its cache; on a GPU an
operation takes far longer than its launch."""


class Tree(Generic[T]):
    """Sum of successive values as a binary tree, with one partial sum for each 1 of a binary counter.

    >>> tree = Tree[float](operator.add)
    >>> for x in (1.0, 2.0, 3.0, 4.0):
    ...     tree.push(x)
    >>> tree.total()  # (1 + 2) + (3 + 4)
    """

    def __init__(self, add: Callable[[T, T], T]):
        self.add = add
        self.kept: list[tuple[int, T]] = []
        """(level, partial sum of 2^level values), the largest level first."""

    def push(self, value: T, level: int = 0) -> None:
        """Adds the next value, which is itself a sum of 2^`level` values."""
        while self.kept and self.kept[-1][0] == level:
            value, level = self.add(self.kept.pop()[1], value), level + 1
        self.kept.append((level, value))

    def total(self) -> T:
        """Returns the sum of all values pushed; smaller partial sums are added to larger ones."""
        *larger, (_, value) = self.kept
        for _, sum_ in reversed(larger):
            value = self.add(sum_, value)
        return value


def tree_sum(values: Iterable[T], add: Callable[[T, T], T]) -> T:
    """Returns the sum of one or more values as a binary tree; `add` returns the sum of two."""
    tree = Tree[T](add)
    for value in values:
        tree.push(value)
    return tree.total()


def bucket_of(device: str) -> int:
    """Returns the most elements of a bucket on a type of device, "cpu" or another."""
    return ON_CPU if device == "cpu" else ON_GPU


def buckets(sizes: Iterable[int], most: int) -> Iterator[list[tuple[int, slice]]]:
    """Yields buckets of at most `most` elements that together cover tensors of these sizes; a bucket is a list of
    (index of the tensor, slice of its elements).

    A piece that fills more than half of a bucket is a bucket by itself, so that it can be summed in place."""
    bucket: list[tuple[int, slice]] = []
    held = 0
    for number, size in enumerate(sizes):
        for start in range(0, size, most):
            piece = slice(start, min(start + most, size))
            values = piece.stop - piece.start
            if 2 * values > most:
                yield [(number, piece)]
                continue
            if held + values > most:
                yield bucket
                bucket, held = [], 0
            bucket.append((number, piece))
            held += values
    if bucket:
        yield bucket


def add_to(kept: list[Tensor | None], more: list[Tensor | None]) -> list[Tensor | None]:
    """Returns the sums of paired gradients, added to those in `kept` in place; a missing gradient (None) counts as
    zero."""
    pairs = [(a, b) for a, b in zip(kept, more, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_add_([local(a) for a, _ in pairs], [local(b) for _, b in pairs])
    return [b if a is None else a for a, b in zip(kept, more, strict=True)]


@torch.no_grad()
def row_squares(gradient: Tensor) -> Tensor:
    """Returns the sum of squares in fp64 of each row of a gradient, and of each `LONGEST` elements of a longer row:
    (k,) numbers, each independent of other rows. Each element of a vector is a row."""
    if gradient.dim() < 2:
        return exact(gradient).square().flatten()
    rows = gradient.reshape(-1, gradient.shape[-1])
    return torch.cat([_of_short_rows(some) for some in rows.split(LONGEST, dim=1)])


def _of_short_rows(rows: Tensor) -> Tensor:
    if exact_device(rows.device).type != "cpu":
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()
    found, step = torch.empty(len(rows), dtype=torch.float64), max(1, VALUES_PER_BLOCK // max(1, rows.shape[1]))
    for some, into in zip(rows.split(step), found.split(step), strict=True):
        torch.sum(exact(some).square_(), 1, out=into)
    return found


def norm_of_rows(squares: Sequence[Tensor]) -> float:
    """Returns the norm of all gradients from their `row_squares`: the exact sum is rounded once, so that the order has
    no effect."""
    try:
        return math.sqrt(math.fsum(torch.cat([one.cpu() for one in squares]).tolist())) if squares else 0.0
    except OverflowError:
        return math.inf


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor; another tensor is returned itself."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
