from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from glassformer.parts.norm.base import NormConfig


class LayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * w + b over the last axis; x, y (..., d). Ba et al. 2016, 1607.06450.

    `bias=False` leaves b out (MPT, nanoGPT's option).
    """

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    @torch.no_grad()
    def init_weights(self, init: object) -> None:
        self.weight.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()


class LayerNormConfig(NormConfig, kind="layernorm"):
    bias: bool = True

    def over(self, width: int) -> LayerNorm:
        return LayerNorm(width, self.eps, self.bias)

    def params_over(self, width: int) -> int:
        return width * (2 if self.bias else 1)
