from __future__ import annotations

from pydantic import Field
from torch import nn

from glassformer.parts.base import BuildContext, PartConfig


class NormConfig(PartConfig, axis="norm"):
    """A map (..., d) -> (..., d) that fixes a token's scale."""

    eps: float = Field(1e-5, gt=0)

    def over(self, width: int) -> nn.Module:
        """The module that normalises vectors of `width` values."""
        raise NotImplementedError

    def params_over(self, width: int) -> int:
        raise NotImplementedError

    def build(self, ctx: BuildContext) -> nn.Module:
        return self.over(ctx.d_model)

    def num_params(self, ctx: BuildContext) -> int:
        return self.params_over(ctx.d_model)
