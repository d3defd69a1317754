from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.base import BuildContext
from glassformer.parts.position.base import AttentionPosition, AttentionPositionConfig, Positions
from glassformer.parts.precision import wide
from glassformer.parts.position.scaling import RotaryScalingConfig, Scaling

Pairing = Literal["half", "interleaved"]


class Rotary(AttentionPosition):
    """Turns pair i of each head by the angle p theta_i, theta_i = base^(-2i/r): (q_m, k_n) depends on m - n alone.

    Su et al. 2021, 2104.09864. r = `dim` leading values of the head are turned, the rest pass (GPT-NeoX turns a
    quarter). `half` pairs (x_i, x_{i+r/2}) as GPT-NeoX and Hugging Face do, `interleaved` pairs (x_2i, x_2i+1) as
    the paper does; they are equal up to a permutation of the head's values.
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        dim: int | None = None,
        pairing: Pairing = "half",
        scaling: Scaling | None = None,
    ):
        super().__init__()
        self.dim = head_dim if dim is None else dim
        if not 0 < self.dim <= head_dim or self.dim % 2:
            raise RequestError(
                f"position=rotary turns {self.dim} of head_dim={head_dim} values; it must be an even number "
                f"between 2 and {head_dim}"
            )
        self.base, self.scaling = base, scaling or Scaling()
        self.pairing = pairing
        self._turn = turn_half if pairing == "half" else turn_interleaved
        self._key = ("rotary", self.dim, base, pairing, self.scaling.key)

    def tables(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles, fp32, (s, 1, r/2) or (b, s, 1, r/2): they broadcast over heads."""

        def make() -> tuple[Tensor, Tensor]:
            device = positions.ids.device
            exponent = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
            theta = self.scaling.frequencies(exponent, self.base, self.dim, positions.end)
            angle = (positions.ids.float()[..., None] * theta)[..., None, :]
            return angle.cos() * self.scaling.magnitude, angle.sin() * self.scaling.magnitude

        return positions.once(self._key, make)

    def forward(self, q: Tensor, k: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        cos, sin = self.tables(positions)
        return self._turn(q, cos, sin), self._turn(k, cos, sin)


def turn_half(x: Float[Tensor, "b s n h"], cos: Tensor, sin: Tensor) -> Float[Tensor, "b s n h"]:
    """Pairs (x_i, x_{i+r/2}), r = 2 * cos.shape[-1]."""
    half = cos.shape[-1]
    a, b, rest = wide(x[..., :half]), wide(x[..., half : 2 * half]), x[..., 2 * half :]
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], dim=-1)


def turn_interleaved(x: Float[Tensor, "b s n h"], cos: Tensor, sin: Tensor) -> Float[Tensor, "b s n h"]:
    """Pairs (x_2i, x_2i+1)."""
    dim = 2 * cos.shape[-1]
    pairs, rest = wide(x[..., :dim]).unflatten(-1, (-1, 2)), x[..., dim:]
    a, b = pairs.unbind(-1)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


class RotaryConfig(AttentionPositionConfig, kind="rotary"):
    base: float = Field(10000.0, gt=1)
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of the head that is turned."""
    pairing: Pairing = "half"
    scaling: RotaryScalingConfig | None = None

    def for_heads(self, n_heads: int, head_dim: int, ctx: BuildContext) -> Rotary:
        scaling = self.scaling.over(ctx.context) if self.scaling else None
        return Rotary(head_dim, self.base, int(head_dim * self.fraction), self.pairing, scaling)
