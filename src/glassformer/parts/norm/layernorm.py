from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.norm.base import Norm, NormConfig, norm_cost
from glassformer.parts.precision import exact, wide
from glassformer.parts.region import compiling_regions, region


class LayerNorm(Norm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * w + b over the last axis; x, y (..., d). Ba et al. 2016, 1607.06450.

    `bias=False` leaves b out (MPT, Cohere). With `sets`, x is (..., sets, d) and w, b are (sets, d).
    """

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True, sets: int | None = None):
        super().__init__()
        self.eps = eps
        shape = (width,) if sets is None else (sets, width)
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape)) if bias else None

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        if self.weight.dim() == 2:
            y = F.layer_norm(wide(x), x.shape[-1:], None, None, self.eps) * self.weight
            return (y if self.bias is None else y + self.bias).to(self.out_dtype(x))
        if compiling_regions():
            return _LayerNorm.apply(x, self.weight, self.bias, self.eps, self.out_dtype(x))
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps).to(self.out_dtype(x))

    def held(self, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        below = direction * exact(self.weight) / (x.var(correction=0) + self.eps).sqrt()
        constant = direction.new_zeros(()) if self.bias is None else direction @ exact(self.bias)
        return below - below.mean(), constant

    @torch.no_grad()
    def init_weights(self, init: object) -> None:
        self.weight.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()


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
    """`F.layer_norm` with its loops fused, conversion to the products' dtype included."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
        y, mean, rate = _forward(x, weight, bias, eps, dtype)
        ctx.save_for_backward(x, weight, mean, rate)
        ctx.biased = bias is not None
        return y

    @staticmethod
    @once_differentiable
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


class LayerNormConfig(NormConfig, kind="layernorm", words="layernorm"):
    bias: bool = True

    def build(self, ctx: BuildContext) -> LayerNorm:
        return LayerNorm(ctx.width or ctx.d_model, self.eps, self.bias, ctx.sets)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        return norm_cost(ctx, shape, weights=2 if self.bias else 1, statistics=2)
