from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from glassformer.parts.base import BuildContext
from glassformer.parts.norm import NormConfig
from glassformer.parts.residual.base import Branch, Residual, ResidualConfig


class Sandwich(Residual):
    """x <- x + norm(mixer(norm(x))); x <- x + norm(ffn(norm(x))). Ding et al. 2021, 2105.13290; Gemma 2.

    x ─┬───────────────────────(+)─┬─────────────────────(+)─
       └─ norm ─ mixer ─ norm ──┘  └─ norm ─ ffn ─ norm ──┘
    """

    def __init__(
        self,
        mixer_norm: nn.Module,
        mixer_post_norm: nn.Module,
        ffn_norm: nn.Module | None = None,
        ffn_post_norm: nn.Module | None = None,
        dropout: float = 0.0,
    ):
        super().__init__(dropout)
        self.mixer_norm, self.mixer_post_norm = mixer_norm, mixer_post_norm
        self.ffn_norm, self.ffn_post_norm = ffn_norm, ffn_post_norm
        self.feeding(mixer_norm)
        self.feeding(ffn_norm)

    def forward(self, x: Tensor, mixer: Branch, ffn: Branch | None) -> Tensor:
        x = self.resid_mid(x + self.drop(self.mixer_post_norm(mixer(self.mixer_norm(x)))))
        if ffn is None:
            return x
        assert self.ffn_norm is not None, "a block with an ffn needs ffn_norm"
        assert self.ffn_post_norm is not None, "a block with an ffn needs ffn_post_norm"
        return x + self.drop(self.ffn_post_norm(ffn(self.ffn_norm(x))))


class SandwichConfig(ResidualConfig, kind="sandwich"):
    norms: ClassVar[tuple[str, ...]] = ("mixer_norm", "mixer_post_norm", "ffn_norm", "ffn_post_norm")

    def wire(self, ctx: BuildContext, norm: NormConfig, has_ffn: bool) -> Sandwich:
        return Sandwich(**self._norms(ctx, norm, has_ffn), dropout=self.dropout)
