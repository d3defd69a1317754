from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from glassformer.parts.norm.base import NormConfig
from glassformer.parts.precision import wide


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w over the last axis; x, y (..., d). Zhang & Sennrich 2019, 1910.07467.

    `unit_offset` stores w - 1, so that weights begin at zero and decay towards the identity: y = ... * (1 + w)
    (Gemma). The mean is taken in fp32 whatever the input.
    """

    def __init__(self, width: int, eps: float = 1e-5, unit_offset: bool = False):
        super().__init__()
        self.eps = eps
        self.unit_offset = unit_offset
        self.weight = nn.Parameter(torch.empty(width))
        self.init_weights(None)

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        weight = self.weight + 1.0 if self.unit_offset else self.weight
        return rms_norm(x, weight, self.eps)

    @torch.no_grad()
    def init_weights(self, init: object) -> None:
        self.weight.fill_(0.0 if self.unit_offset else 1.0)


def naive_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition: x (..., d), weight (d,)."""
    x_wide = wide(x)
    return (x_wide * torch.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


rms_norm = naive_rms_norm


class RMSNormConfig(NormConfig, kind="rmsnorm"):
    unit_offset: bool = False

    def over(self, width: int) -> RMSNorm:
        return RMSNorm(width, self.eps, self.unit_offset)

    def params_over(self, width: int) -> int:
        return width
