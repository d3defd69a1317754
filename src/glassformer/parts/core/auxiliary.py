"""Auxiliary losses: computed by parts inside the model, added to the gradient of the model's loss.

A part calls `add(loss)`. The caller that computes the loss of the whole pass opens `gathering()` around it and then
calls `join`: the value of the loss does not change, but its gradient becomes that of the loss plus the added losses. A
factor on the loss (a microbatch's share, a loss scale against underflow) therefore multiplies the added losses too.
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
    """Context manager that yields a list to which calls of `add` in this thread append auxiliary losses."""
    added: list[Tensor] = []
    thread.added.append(added)
    try:
        yield added
    finally:
        thread.added.pop()


def add(loss: Tensor) -> None:
    """Adds an auxiliary loss to the list of the innermost `gathering()`; does nothing outside such a context (in
    generation, or for logits without a loss)."""
    if thread.added:
        thread.added[-1].append(loss)


def join(loss: Tensor, added: Sequence[Tensor]) -> Tensor:
    """Returns `loss` with the gradient of loss + the sum of `added`. If `loss` has several values, the caller must
    average them later, with weights that sum to 1."""
    return _Join.apply(loss, *added) if added else loss


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *added: Tensor) -> Tensor:
        ctx.count = len(added)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *[grads[0].sum()] * ctx.count
