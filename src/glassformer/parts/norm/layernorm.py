from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.norm.base import Norm, NormConfig, RowNorm, norm_cost
from glassformer.parts.norm.fused_layer_norm import layer_norm
from glassformer.parts.precision import exact, wide


class LayerNorm(Norm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * w + b over the last axis; x, y (..., d). Ba et al. 2016, 1607.06450.

    `bias=False` leaves b out (MPT, Cohere). With `sets`, x is (..., sets, d) and w, b are (sets, d).
    """

    def __init__(
        self, width: int, eps: float = 1e-5, bias: bool = True, sets: int | None = None, feeds_products: bool = False
    ):
        super().__init__(feeds_products)
        self.eps = eps
        shape = (width,) if sets is None else (sets, width)
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape)) if bias else None

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        if self.weight.dim() == 2:
            y = F.layer_norm(wide(x), x.shape[-1:], None, None, self.eps) * self.weight
            return (y if self.bias is None else y + self.bias).to(self.out_dtype(x))
        return layer_norm(x, self.weight, self.bias, self.eps, self.out_dtype(x))

    def of_rows(self) -> RowNorm | None:
        plain = type(self).forward is LayerNorm.forward and self.weight.dim() == 1
        return RowNorm(self.eps, True, self.weight, self.bias) if plain else None

    def held(self, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        below = direction * exact(self.weight) / (x.var(correction=0) + self.eps).sqrt()
        constant = direction.new_zeros(()) if self.bias is None else direction @ exact(self.bias)
        return below - below.mean(), constant

    @torch.no_grad()
    def init_weights(self, init: object) -> None:
        self.weight.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()


class LayerNormConfig(NormConfig, kind="layernorm", words="layernorm"):
    bias: bool = True

    @property
    def of_rows(self) -> bool:
        return True

    def build(self, ctx: BuildContext) -> LayerNorm:
        return LayerNorm(ctx.width or ctx.d_model, self.eps, self.bias, ctx.sets, ctx.feeds_products)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        return norm_cost(ctx, shape, weights=2 if self.bias else 1, statistics=2)
