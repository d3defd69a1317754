"""Sums whose bits do not depend on how many processes add them up.

A step's gradient is the sum of its atoms' gradients, micro-batches of a fixed size. They are added up as a binary tree,
((0 + 1) + (2 + 3)) + ..., whose lower levels lie within the ranks of one round and whose upper ones over the rounds: a
power of two of ranks that divides the atoms cuts the tree between two levels, and every sum in it stays what it was.
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
"""Values of a row that are added up at once: torch divides a single longer sum among its threads."""
VALUES_PER_BLOCK = 1 << 17
"""Of a gradient in fp64, so many at once: they stay in the processor's cache."""

ON_CPU, ON_GPU = 1 << 21, 1 << 24
"""Values that are traded at once between copies of the weights: as many as a processor's cache holds; elsewhere so many
that an operation takes far longer than its start."""


class Tree(Generic[T]):
    """Adds up what comes one after the other, keeping as many sums as a binary counter has ones.

    >>> tree = Tree[float](operator.add)
    >>> for x in (1.0, 2.0, 3.0, 4.0):
    ...     tree.push(x)
    >>> tree.total()  # (1 + 2) + (3 + 4)
    """

    def __init__(self, add: Callable[[T, T], T]):
        self.add = add
        self.kept: list[tuple[int, T]] = []
        """(level, sum of 2^level), the largest first."""

    def push(self, value: T, level: int = 0) -> None:
        """Takes the next value, itself a sum of 2^level."""
        while self.kept and self.kept[-1][0] == level:
            value, level = self.add(self.kept.pop()[1], value), level + 1
        self.kept.append((level, value))

    def total(self) -> T:
        """The sum of all; what is left of smaller powers of two is added to the larger ones."""
        *larger, (_, value) = self.kept
        for _, sum_ in reversed(larger):
            value = self.add(sum_, value)
        return value


def tree_sum(values: Iterable[T], add: Callable[[T, T], T]) -> T:
    """The sum of values, of which there is at least one, as a tree."""
    tree = Tree[T](add)
    for value in values:
        tree.push(value)
    return tree.total()


def bucket_of(device: str) -> int:
    """Values of a bucket on a type of device."""
    return ON_CPU if device == "cpu" else ON_GPU


def buckets(sizes: Iterable[int], most: int) -> Iterator[list[tuple[int, slice]]]:
    """Divides tensors of so many values into buckets of `most` at most: (number of the tensor, which of its values).

    A piece that fills more than half of a bucket has it for itself, so that it can be added up where it lies."""
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
    """a + b of each pair, in the place of a; None is no gradient."""
    pairs = [(a, b) for a, b in zip(kept, more, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_add_([local(a) for a, _ in pairs], [local(b) for _, b in pairs])
    return [b if a is None else a for a, b in zip(kept, more, strict=True)]


@torch.no_grad()
def row_squares(gradient: Tensor) -> Tensor:
    """sum_j g_ij^2 in fp64 of each row, and of each `LONGEST` values of a longer one: (k,) numbers that do not depend
    on the rows beside them. A vector's values are rows of one."""
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
    """The norm from `row_squares` of all gradients: their exact sum, rounded once, so that their order is nothing."""
    try:
        return math.sqrt(math.fsum(torch.cat([one.cpu() for one in squares]).tolist())) if squares else 0.0
    except OverflowError:
        return math.inf


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
