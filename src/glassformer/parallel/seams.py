"""Differentiable collectives: functions across a group of processes whose gradients are collectives too.

forward                      backward
same         x               summed       enter: start of a divided branch
summed       sum_r x_r       same         leave: end of a divided branch
summed       sum_r x_r       summed       mix: a sum inside a branch, whose inputs are divided again
gathered     [x_1, x_2]      own          the result is replicated on every process
gathered     [x_1, x_2]      scattered    the result is divided: each process has a share of the gradient
scattered    own of sum_r    gathered     a branch ends in slices of a sequence
own          own of x        gathered     a replicated value is divided

Slices along an axis are of equal sizes or differ by one, as `Shard.span` cuts a vocabulary. A group of one process
needs none of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Reduce-scatter of one tensor, by its name in torch 2.13 or in earlier releases."""

Across = Callable[[Tensor], Tensor]


class Group:
    """Collective operations, without gradients, of process `number` among the `of` processes of a group. A deep copy of
    a model keeps the same group."""

    def __init__(self, group: Any):
        self.group, self.number, self.of = group, dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    def same(self, x: Tensor) -> Tensor:
        return x.view_as(x)

    def summed(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.SUM)

    def largest(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.MAX)

    def _reduced(self, x: Tensor, how: Any) -> Tensor:
        made = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(made, how, group=self.group)
        return made

    def span(self, size: int, number: int | None = None) -> tuple[int, int]:
        """Returns (first, end) of the slice of an axis of `size` that process `number` has; None for this process."""
        number = self.number if number is None else number
        return number * size // self.of, (number + 1) * size // self.of

    def own(self, x: Tensor, axis: int) -> Tensor:
        """Returns this process's slice of x along `axis`."""
        first, last = self.span(x.shape[axis])
        return x.narrow(axis, first, last - first).contiguous()

    def gathered(self, x: Tensor, axis: int, size: int) -> Tensor:
        """Returns the slices x of all processes, concatenated along `axis`, which then has length `size`."""
        longest = -(-size // self.of)
        padded = _padded(x.movedim(axis, 0), longest)
        made = padded.new_empty(self.of * longest, *padded.shape[1:])
        all_gather(made, padded, group=self.group)
        if size % self.of:
            spans = (self.span(size, i) for i in range(self.of))
            made = torch.cat([piece[: b - a] for piece, (a, b) in zip(made.chunk(self.of), spans, strict=True)])
        return made.movedim(0, axis)

    def scattered(self, x: Tensor, axis: int) -> Tensor:
        """Returns this process's slice, along `axis`, of the sum of x over all processes."""
        size = x.shape[axis]
        longest, moved = -(-size // self.of), x.movedim(axis, 0)
        spans = [self.span(size, i) for i in range(self.of)]
        given = torch.cat([_padded(moved[a:b], longest) for a, b in spans])
        made = given.new_empty(longest, *given.shape[1:])
        _reduce_scatter(made, given, group=self.group)
        a, b = spans[self.number]
        return made[: b - a].movedim(0, axis).contiguous()


def _padded(x: Tensor, size: int) -> Tensor:
    if len(x) == size:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(size - len(x), *x.shape[1:])])


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Across, back: Across) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0]), None, None


@dataclass(frozen=True)
class Seams:
    """Collective operations whose gradients are collectives too, as in the module's table."""

    group: Group

    def enter(self, x: Tensor) -> Tensor:
        return _Pair.apply(x, self.group.same, self.group.summed)

    def leave(self, x: Tensor) -> Tensor:
        return _Pair.apply(x, self.group.summed, self.group.same)

    def mix(self, x: Tensor) -> Tensor:
        return _Pair.apply(x, self.group.summed, self.group.summed)

    def join(self, x: Tensor, axis: int, size: int) -> Tensor:
        """Returns the slices x of all processes, concatenated to length `size` along `axis`, for use that is equal on
        every process: the gradient is this process's slice."""
        return _Pair.apply(x, partial(self.group.gathered, axis=axis, size=size), partial(self.group.own, axis=axis))

    def gather(self, x: Tensor, axis: int, size: int) -> Tensor:
        """Returns the slices x of all processes, concatenated to length `size` along `axis`, for use that differs
        between processes: the gradient is this process's slice of the sum."""
        back = partial(self.group.scattered, axis=axis)
        return _Pair.apply(x, partial(self.group.gathered, axis=axis, size=size), back)

    def scatter(self, x: Tensor, axis: int) -> Tensor:
        """Returns this process's slice, along `axis`, of the sum of x over all processes; the gradient is gathered."""
        back = partial(self.group.gathered, axis=axis, size=x.shape[axis])
        return _Pair.apply(x, partial(self.group.scattered, axis=axis), back)

    def spread(self, x: Tensor, axis: int) -> Tensor:
        """Returns this process's slice, along `axis`, of x, which every process has; the gradient is gathered."""
        back = partial(self.group.gathered, axis=axis, size=x.shape[axis])
        return _Pair.apply(x, partial(self.group.own, axis=axis), back)
