"""`F.layer_norm` by torch, and a twin whose loops are compiled."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.parts.first_order import first_order
from glassformer.parts.precision import wide
from glassformer.parts.region import compiling_regions, region


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """Returns the layer norm of x (..., d), in `dtype`: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the
    last axis; weight (d,)."""
    if compiling_regions():
        return _LayerNorm.apply(x, weight, bias, eps, dtype)
    return F.layer_norm(x, weight.shape, weight, bias, eps).to(dtype)


@region
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x = wide(x)
    mean = x.mean(-1, keepdim=True)
    rate = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
    y = (x - mean) * rate * weight
    return (y if bias is None else y + bias).to(dtype), mean, rate


@region
def _grad_x(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rate: Tensor) -> Tensor:
    scaled, normed = wide(grad) * weight, (wide(x) - mean) * rate
    inner = scaled - scaled.mean(-1, keepdim=True) - normed * (scaled * normed).mean(-1, keepdim=True)
    return (inner * rate).to(x.dtype)


@region
def _grad_weight(grad: Tensor, x: Tensor, mean: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    grad = wide(grad)
    width = x.shape[-1]
    return (grad * (wide(x) - mean) * rate).reshape(-1, width).sum(0), grad.reshape(-1, width).sum(0)


class _LayerNorm(torch.autograd.Function):
    """Autograd function of `F.layer_norm` with fused loops, including conversion to the matmuls' dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
        y, mean, rate = _forward(x, weight, bias, eps, dtype)
        ctx.save_for_backward(x, weight, mean, rate)
        ctx.biased = bias is not None
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rate = ctx.saved_tensors
        grad_weight, grad_bias = _grad_weight(grads[0], x, mean, rate)
        grad_x = _grad_x(grads[0], x, weight, mean, rate)
        return (
            grad_x,
            grad_weight.to(weight.dtype),
            grad_bias.to(weight.dtype) if ctx.biased else None,
            None,
            None,
        )
