"""Parts of a user's that do more than their configs count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.mixer.attention import Attention, AttentionConfig
from glassformer.parts.mixer.kv import KVState
from glassformer.parts.norm import RMSNorm, RMSNormConfig
from glassformer.parts.own import BuildContext, Pass
from tests.plugin.toy_parts import Ema, EmaConfig, RecurrentState


class WiderAttention(Attention):
    """Attention with a network of 32 d^2 weights behind it."""

    def own(self, d_model: int, bias: bool, reparam: Any) -> None:
        self.more = nn.Sequential(nn.Linear(d_model, 16 * d_model, False), nn.Linear(16 * d_model, d_model, False))

    def forward(self, x: Tensor, pass_: Pass | None = None, state: KVState | None = None) -> Tensor:
        return self.more(super().forward(x, pass_, state))


class WiderAttentionConfig(AttentionConfig, kind="wider_attention"):
    def module(self) -> type[Attention]:
        return WiderAttention


class TwiceAttention(Attention):
    """Attention whose output map is applied twice."""

    def forward(self, x: Tensor, pass_: Pass | None = None, state: KVState | None = None) -> Tensor:
        out = super().forward(x, pass_, state)
        return out + self.output(out)


class TwiceAttentionConfig(AttentionConfig, kind="twice_attention"):
    def module(self) -> type[Attention]:
        return TwiceAttention


class ScaledNorm(RMSNorm):
    """RMSNorm with one more number."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self.more = nn.Parameter(torch.ones(1))


class ScaledNormConfig(RMSNormConfig, kind="scaled_norm"):
    def build(self, ctx: BuildContext) -> ScaledNorm:
        return ScaledNorm(ctx.width or ctx.d_model, self.eps)


class TwoEmas(Ema):
    """Ema whose state is twice the width."""

    def init_state(self, batch: int, max_len: int, dtype: Any, device: Any = None, rewind: int = 0) -> RecurrentState:
        return RecurrentState(batch, {"h": (1, 2 * len(self.decay))}, dtype, device, rewind)


class TwoEmasConfig(EmaConfig, kind="two_emas"):
    def build(self, ctx: BuildContext) -> TwoEmas:
        return TwoEmas(ctx.d_model, self.half_life, ctx.make_reparam)


class UnfilledAttention(Attention):
    """Attention with a number that only its constructor sets."""

    def own(self, d_model: int, bias: bool, reparam: Any) -> None:
        self.heat = nn.Parameter(torch.ones(1))


class UnfilledAttentionConfig(AttentionConfig, kind="unfilled_attention"):
    def module(self) -> type[Attention]:
        return UnfilledAttention

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        return super().costs(ctx, shape) + Cost.weights(1)
