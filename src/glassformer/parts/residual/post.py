from __future__ import annotations

from torch import Tensor, nn

from glassformer.parts.base import BuildContext
from glassformer.parts.norm import NormConfig
from glassformer.parts.residual.base import Branch, Residual, ResidualConfig


class Post(Residual):
    """x <- norm(x + mixer(x)); x <- norm(x + ffn(x)). Vaswani et al. 2017; BERT. Wants a warm-up.

    x ─┬──────────(+)─ norm ─┬────────(+)─ norm ─
       └─ mixer ──┘          └─ ffn ──┘
    """

    def __init__(self, mixer_norm: nn.Module, ffn_norm: nn.Module | None = None, dropout: float = 0.0):
        super().__init__(dropout)
        self.mixer_norm, self.ffn_norm = mixer_norm, ffn_norm

    def forward(self, x: Tensor, mixer: Branch, ffn: Branch | None) -> Tensor:
        x = self.resid_mid(self.mixer_norm(x + self.drop(mixer(x))))
        if ffn is None:
            return x
        assert self.ffn_norm is not None, "a block with an ffn needs ffn_norm"
        return self.ffn_norm(x + self.drop(ffn(x)))


class PostConfig(ResidualConfig, kind="post"):
    def wire(self, ctx: BuildContext, norm: NormConfig, has_ffn: bool) -> Post:
        return Post(**self._norms(ctx, norm, has_ffn), dropout=self.dropout)
