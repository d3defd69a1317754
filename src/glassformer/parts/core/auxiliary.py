"""Losses that arise inside the model, and join the gradient of the loss at its end.

A part says `add(loss)` where its loss arises. Whoever makes the loss of the whole pass opens `gathering()` around it
and lets it `join`: its value stays what it is, its gradient is that of the sum. Whatever factor the whole loss is then
multiplied by (a share of a batch that comes in pieces, a scale against underflow) multiplies what joined it as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from glassformer.parts.core.running import thread


@contextmanager
def gathering() -> Iterator[list[Tensor]]:
    """The losses that are added inside."""
    added: list[Tensor] = []
    thread.added.append(added)
    try:
        yield added
    finally:
        thread.added.pop()


def add(loss: Tensor) -> None:
    """Of a pass whose loss nobody makes here (generation, logits alone) nothing is kept."""
    if thread.added:
        thread.added[-1].append(loss)


def join(loss: Tensor, added: Sequence[Tensor]) -> Tensor:
    """`loss`, with the gradient of loss + the sum of `added`. A loss of many values is taken to be averaged later, with
    weights that sum to 1."""
    return _Join.apply(loss, *added) if added else loss


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *added: Tensor) -> Tensor:
        ctx.count = len(added)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *[grads[0].sum()] * ctx.count
