from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.norm.base import Norm, NormConfig


class Identity(Norm):
    """Identity y = x, in place of a norm; x, y (..., d). For tests of theory about layers without norms; a deep model
    without norms trains only with small weights or branches (Zhang et al. 2019, 1901.09321)."""

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        return x.to(self.out_dtype(x))

    def held(self, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        return direction, direction.new_zeros(())


class IdentityConfig(NormConfig, kind="identity", words="nonorm"):
    """Config of `Identity`, a norm that returns its input; `eps` has no effect."""

    def build(self, ctx: BuildContext) -> Identity:
        return Identity(ctx.feeds_products)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        return Cost()
