"""Rotations of pairs: fast twins of `naive_turn` for training, for a compiler and for eager inference."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from glassformer.parts import fused_loops
from glassformer.parts.first_order import first_order
from glassformer.parts.precision import wide
from glassformer.parts.region import compiling_regions, region


def turn(x: Float[Tensor, "b s n h"], cos: Tensor, sin: Tensor, pair_axis: int) -> Float[Tensor, "b s n h"]:
    """Returns x with its pairs rotated as by `naive_turn`; the result is laid out head by head, as kernels read it."""
    if torch.is_grad_enabled():
        return _Turn.apply(x, cos, sin, pair_axis)
    made = fused_loops.turn(x, cos, sin, pair_axis)
    if made is not None:
        return made
    return (_turn if torch.compiler.is_compiling() else _turn_unfused)(x, cos, sin, pair_axis)


@region
def _turn(x: Tensor, cos: Tensor, sin: Tensor, pair_axis: int) -> Tensor:
    r = cos.shape[-1] * cos.shape[-2]
    pairs = wide(x[..., :r]).unflatten(-1, (cos.shape[-2], cos.shape[-1]))
    turned = (pairs * cos + pairs.flip(pair_axis) * sin).flatten(-2).to(x.dtype)
    whole = turned if r == x.shape[-1] else torch.cat([turned, x[..., r:]], dim=-1)
    return whole.transpose(1, 2).contiguous().transpose(1, 2)


def _turn_unfused(x: Tensor, cos: Tensor, sin: Tensor, pair_axis: int) -> Tensor:
    """Returns x (b, s, n, h) with its pairs rotated, bit for bit the result of `_turn`, in fewer passes over memory if
    nothing is fused."""
    r = cos.shape[-1] * cos.shape[-2]
    heads = x.transpose(1, 2)  # (b, n, s, h), the layout of the result
    pairs = wide(heads[..., :r].contiguous()).unflatten(-1, cos.shape[-2:])
    cos, sin = cos.transpose(-4, -3), sin.transpose(-4, -3)
    turned = pairs * cos
    for one, other in ((0, 1), (1, 0)):
        turned.select(pair_axis, one).add_(pairs.select(pair_axis, other) * sin.select(pair_axis, one))
    turned = turned.flatten(-2).to(x.dtype)
    return (turned if r == x.shape[-1] else torch.cat([turned, heads[..., r:]], dim=-1)).transpose(1, 2)


@region
def _turn_back(grad: Tensor, cos: Tensor, sin: Tensor, pair_axis: int) -> Tensor:
    """Returns the gradient of x in a rotation of pairs, from that of the result: a rotation by the negative angle."""
    r = cos.shape[-1] * cos.shape[-2]
    pairs = wide(grad[..., :r]).unflatten(-1, (cos.shape[-2], cos.shape[-1]))
    turned = (pairs * cos - pairs.flip(pair_axis) * sin).flatten(-2).to(grad.dtype)
    return (turned if r == grad.shape[-1] else torch.cat([turned, grad[..., r:]], dim=-1)).contiguous()


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pair_axis: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pair_axis = pair_axis
        if (made := fused_loops.turn(x, cos, sin, pair_axis)) is not None:
            return made
        fused = torch.compiler.is_compiling() or compiling_regions()
        return (_turn if fused else _turn_unfused)(x, cos, sin, pair_axis)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        made = fused_loops.turn(grads[0], cos, sin, ctx.pair_axis, back=True)
        return _turn_back(grads[0], cos, sin, ctx.pair_axis) if made is None else made, None, None, None
