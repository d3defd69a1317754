from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.init import DeepNormInitConfig, InitConfig
from glassformer.parts.residual.base import Branch, ResidualConfig, Sequential


class DeepNorm(Sequential):
    """DeepNorm's wiring x <- norm(alpha x + mixer(x)); x <- norm(alpha x + ffn(x)). Wang et al. 2022, 2203.00555.

    Post-norm whose stream outweighs its branches, alpha = (2 L)^(1/4), so that a step moves a thousand layers by a
    bounded amount; it needs the initial weights of `init=deepnorm`.

    x ─┬─ alpha ──(+)─ norm ─┬─ alpha ─(+)─ norm ─
       └─ mixer ───┘         └─ ffn ────┘
    """

    def __init__(
        self,
        mixer_norm: nn.Module,
        ffn_norm: nn.Module | None = None,
        dropout: float = 0.0,
        scale: float = 1.0,
        alpha: float = 1.0,
    ):
        super().__init__(dropout, scale)
        self.mixer_norm, self.ffn_norm = mixer_norm, ffn_norm
        self.alpha = alpha

    def mix(self, x: Tensor, mixer: Branch) -> Tensor:
        return self.resid_mid(self.mixer_norm(self.alpha * x + self.share(mixer(x))))

    def feed(self, x: Tensor, ffn: Branch) -> Tensor:
        assert self.ffn_norm is not None, "a block with an ffn needs ffn_norm"
        return self.ffn_norm(self.alpha * x + self.share(ffn(x)))


class DeepNormConfig(ResidualConfig, kind="deepnorm", words="deepnorm"):
    wiring = DeepNorm
    feeds_products: ClassVar[bool] = False
    ends_in_norm: ClassVar[bool] = True
    brings: ClassVar[InitConfig] = DeepNormInitConfig()
    alpha: float | None = Field(None, gt=0)
    """Factor alpha; None for (2 L)^(1/4) of L layers."""

    def _alpha(self, ctx: BuildContext) -> float:
        return self.alpha or ctx.n_branches**0.25

    def resolved(self, ctx: BuildContext) -> ResidualConfig:
        return super().resolved(ctx).replace(alpha=self._alpha(ctx))

    def numbers(self, ctx: BuildContext) -> dict[str, Any]:
        return {**super().numbers(ctx), "alpha": self._alpha(ctx)}
