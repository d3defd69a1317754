from __future__ import annotations

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.base import BuildContext
from glassformer.parts.position.base import EmbeddingPosition, EmbeddingPositionConfig, Positions


def sinusoid(ids: Int[Tensor, "*s"], d_model: int, base: float) -> Float[Tensor, "*s d"]:
    """PE(p, 2i) = sin(p / base^(2i/d)), PE(p, 2i+1) = cos(p / base^(2i/d)), in fp32."""
    rate = base ** (-torch.arange(0, d_model, 2, device=ids.device, dtype=torch.float32) / d_model)
    angle = ids.float()[..., None] * rate  # (*s, d/2)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


class Sinusoidal(EmbeddingPosition):
    """Fixed sines and cosines of geometric wavelengths, no weights, no end. Vaswani et al. 2017, 1706.03762, 3.5."""

    def __init__(self, d_model: int, base: float = 10000.0):
        super().__init__()
        if d_model % 2:
            raise RequestError(f"position=sinusoidal needs an even d_model, and d_model={d_model}")
        self.d_model, self.base = d_model, base

    def forward(self, positions: Positions) -> Tensor:
        return sinusoid(positions.ids, self.d_model, self.base)


class SinusoidalConfig(EmbeddingPositionConfig, kind="sinusoidal"):
    base: float = Field(10000.0, gt=1)

    def build(self, ctx: BuildContext) -> Sinusoidal:
        return Sinusoidal(ctx.d_model, self.base)
