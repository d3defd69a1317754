from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from glassformer.parts.residual.base import Branch
from glassformer.parts.residual.deepnorm import DeepNorm, DeepNormConfig


class Normed(DeepNorm):
    """Wiring u = norm(x), x <- alpha u + mixer(u); u = norm(x), x <- alpha u + ffn(u). MiniMax-01, 2501.08313.

    `DeepNorm` with each norm before a branch instead of after the previous one: `DeepNorm` with a norm at the embedding
    equals this wiring with a final norm.

    x ─ norm ─┬─ alpha ──(+)─ norm ─┬─ alpha ─(+)─
              └─ mixer ───┘         └─ ffn ────┘
    """

    norms_stream: ClassVar[bool | None] = None

    def mix(self, x: Tensor, mixer: Branch) -> Tensor:
        x = self.mixer_norm(x)
        return self.resid_mid(self.alpha * x + self.share(mixer(x)))

    def feed(self, x: Tensor, ffn: Branch) -> Tensor:
        assert self.ffn_norm is not None, "a block with an ffn needs ffn_norm"
        x = self.ffn_norm(x)
        return self.alpha * x + self.share(ffn(x))


class NormedConfig(DeepNormConfig, kind="normed"):
    wiring = Normed
    ends_in_norm: ClassVar[bool] = False
