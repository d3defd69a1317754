from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from glassformer.parts import fused_loops
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.first_order import first_order
from glassformer.parts.norm.base import Norm, NormConfig, RowNorm, norm_cost
from glassformer.parts.precision import exact, wide
from glassformer.parts.region import region


class RMSNorm(Norm):
    """y = x / sqrt(mean(x^2) + eps) * w over the last axis; x, y (..., d). Zhang & Sennrich 2019, 1910.07467.

    `unit_offset` stores w - 1, so that weights are initialised to zero and decay towards the identity: y = ... * (1 +
    w) (Gemma); without `affine`, w is absent (Llama 4's norm of queries and keys). With `sets`, x is (..., sets, d) and
    w is (sets, d). The mean is always in fp32.
    """

    weight: Any
    """Weights w, or w - 1 with `unit_offset`; None without `affine`."""

    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        unit_offset: bool = False,
        sets: int | None = None,
        affine: bool = True,
        feeds_products: bool = False,
    ):
        super().__init__(feeds_products)
        self.eps = eps
        self.unit_offset = unit_offset
        shape = (width,) if sets is None else (sets, width)
        self.register_parameter("weight", nn.Parameter(torch.empty(shape)) if affine else None)
        self.init_weights(None)

    def factor(self) -> Tensor:
        """Returns the factors w of the elements."""
        return wide(self.weight) + 1.0 if self.unit_offset else self.weight

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        if self.weight is None:
            weight = torch.ones(x.shape[-1], dtype=wide(x[:0]).dtype, device=x.device)
        else:
            weight = self.factor()
        if weight.dim() == 2:
            return naive_rms_norm(x, weight, self.eps)
        return rms_norm(x, weight, self.eps, self.out_dtype(x))

    def of_rows(self) -> RowNorm | None:
        plain = type(self).forward is RMSNorm.forward and self.weight is not None and self.weight.dim() == 1
        return RowNorm(self.eps, False, self.factor(), None) if plain else None

    def held(self, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        if self.weight is not None:
            direction = direction * (exact(self.weight) + (1.0 if self.unit_offset else 0.0))
        return direction / (x.square().mean() + self.eps).sqrt(), direction.new_zeros(())

    @torch.no_grad()
    def init_weights(self, init: object) -> None:
        if self.weight is not None:
            self.weight.fill_(0.0 if self.unit_offset else 1.0)


def naive_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMS norm of x (..., d) by its definition, x / sqrt(mean(x^2) + eps) * weight, in fp32 or wider; the
    weight is broadcast over x."""
    x_wide = wide(x)
    return (x_wide * torch.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the RMS norm of x as `naive_rms_norm`, in `dtype`, by default that of x; keeps x and one number per token
    for the backward pass."""
    if not torch.is_grad_enabled():
        made = fused_loops.half_rms_norm(x, weight, eps) if dtype in (None, x.dtype) else None
        return _made(x, weight, eps, dtype or x.dtype)[0] if made is None else made
    return _RMSNorm.apply(x, weight, eps, dtype or x.dtype)


def _made(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the RMS norm of x and the rates (..., 1)."""
    made = fused_loops.rms_norm(x, weight, eps) if dtype == torch.float32 else None
    return made or _forward(x, weight, eps, dtype)


@region
def _forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = wide(x)
    rate = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * rate).mul_(weight).to(dtype), rate


@region
def _grad_x(grad: Tensor, x: Tensor, weight: Tensor, rate: Tensor) -> Tensor:
    scaled, normed = wide(grad) * weight, wide(x) * rate
    dot = (scaled * normed).mean(-1, keepdim=True)
    return torch.addcmul(scaled, normed, dot, value=-1).mul_(rate).to(x.dtype)


@region
def _grad_weight(grad: Tensor, x: Tensor, rate: Tensor) -> Tensor:
    return (wide(grad) * wide(x) * rate).reshape(-1, x.shape[-1]).sum(0)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        y, rate = _made(x, weight, eps, dtype)
        ctx.save_for_backward(x, weight, rate)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rate = ctx.saved_tensors
        made = fused_loops.rms_norm_grad(grads[0], x, weight, rate)
        grad_x, grad_weight = made or (_grad_x(grads[0], x, weight, rate), _grad_weight(grads[0], x, rate))
        return grad_x, grad_weight.to(weight.dtype), None, None


class RMSNormConfig(NormConfig, kind="rmsnorm", words="rmsnorm"):
    unit_offset: bool = False
    affine: bool = True
    """True for a norm with weights w."""

    @property
    def of_rows(self) -> bool:
        return self.affine

    def build(self, ctx: BuildContext) -> RMSNorm:
        return RMSNorm(ctx.width or ctx.d_model, self.eps, self.unit_offset, ctx.sets, self.affine, ctx.feeds_products)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        return norm_cost(ctx, shape, weights=int(self.affine), statistics=1)
