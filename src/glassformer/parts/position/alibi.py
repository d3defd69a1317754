from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.owner import Owner, of_owner
from glassformer.parts.forward_pass import Pass, position_in_document
from glassformer.parts.kernel.base import ScoreBias
from glassformer.parts.position.base import AttentionPosition, AttentionPositionConfig
from glassformer.parts.position.picture import Plot, some


def alibi_slopes(n_heads: int, max_bias: float = 8.0) -> list[float]:
    """Returns the slopes of the penalty on distance for n heads, m_i = 2^(-max_bias i / n), i = 1..n, if n is a power
    of two.

    Otherwise the slopes of the power of two below, followed by every other slope of the power of two above (the rule of
    the paper's code, which BLOOM and MPT follow).
    """
    below = 2 ** math.floor(math.log2(n_heads))
    slopes = [2.0 ** (-max_bias * i / below) for i in range(1, below + 1)]
    between = [2.0 ** (-max_bias * i / (2 * below)) for i in range(1, 2 * below, 2)]
    return (slopes + between)[:n_heads]


class Alibi(AttentionPosition):
    """Position bias score - m_n |q - k|: a head-specific linear penalty on distance, no weights. Press et al. 2022,
    2108.12409.

    The distance is between slots, or between given positions. `rounded`: the bias is instead m_n k, k the key's
    position in its document, with m, k and their product rounded to bf16, as Falcon was trained (2311.16867): softmax
    differs only by the rounding. `scale` multiplies the slopes.
    """

    def __init__(self, n_heads: int, max_bias: float = 8.0, rounded: bool = False, scale: float = 1.0):
        super().__init__()
        self.slopes, self.rounded, self.scale = alibi_slopes(n_heads, max_bias), rounded, scale
        self._key = ("alibi", rounded, scale, *self.slopes)

    def take_share(self, owner: Owner) -> None:
        self.slopes = of_owner(self.slopes, owner)
        self._key = ("alibi", self.rounded, self.scale, *self.slopes)

    def bias(self, pass_: Pass) -> ScoreBias:
        return pass_.once(self._key, lambda: self._rounded(pass_) if self.rounded else self._plain(pass_))

    def _rounded(self, pass_: Pass) -> ScoreBias:
        slopes = torch.tensor(self.slopes, device=pass_.ids.device).bfloat16()
        at = pass_.given
        if at is None and pass_.documents is not None:
            at = position_in_document(pass_.documents)

        def add(score: Tensor, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
            k = k_idx if at is None else at[b, k_idx.clamp(max=at.shape[1] - 1)]  # an empty slot is invisible
            return score + (slopes[n] * k.bfloat16()).to(score.dtype) * self.scale

        return ScoreBias(add, True, self._key)

    def _plain(self, pass_: Pass) -> ScoreBias:
        slopes, given = torch.tensor(self.slopes, device=pass_.ids.device) * self.scale, pass_.given

        def penalise(score: Tensor, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
            if given is not None:
                last = given.shape[1] - 1  # an empty slot of a state counts as a future token
                q_idx, k_idx = given[b, q_idx.clamp(max=last)], given[b, k_idx.clamp(max=last)]
            return score - slopes[n] * (q_idx - k_idx).abs()

        return ScoreBias(penalise, True, self._key)

    def picture(self, length: int) -> dict[str, Plot]:
        """Returns named plots of the slopes m_n, of the bias -m_n k, and of its factor e^(-m_n k) on the weight of a
        key k tokens back."""
        slopes, at = torch.tensor(self.slopes) * self.scale, some(length)
        evenly = torch.arange(0, length, max(length // 256, 1))
        heads = tuple(f"head {n}" for n in range(len(slopes)))
        return {
            "slope by head": Plot("head", "slope", torch.arange(len(slopes)), slopes[None], ("m",), log=True),
            "bias by distance": Plot("distance", "bias", evenly, -slopes[:, None] * evenly, heads),
            "weight left by distance": Plot("distance", "head", at, (-slopes[:, None] * at).exp()),
        }

    def extra_repr(self) -> str:
        return f"heads={len(self.slopes)}"


class AlibiConfig(AttentionPositionConfig, kind="alibi", words="alibi"):
    biases: ClassVar[bool] = True
    max_bias: float = Field(8.0, gt=0)
    rounded: bool = False
    """True to add slopes times positions of keys, rounded to bf16, instead of slopes times distances."""
    scaled: bool = False
    """True to multiply slopes by 1 / sqrt(head_dim), as scores are multiplied."""

    def build(self, ctx: BuildContext) -> Alibi:
        return Alibi(ctx.n_heads, self.max_bias, self.rounded, ctx.head_dim**-0.5 if self.scaled else 1.0)
