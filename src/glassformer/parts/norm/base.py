from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from glassformer.parts.base import BuildContext, PartConfig
from glassformer.parts.precision import product_dtype


class Norm(nn.Module):
    """A map (..., d) -> (..., d) that fixes a token's scale.

    It returns x's dtype; with `feeds_products` (set by a wiring for norms whose output only matrix products read) the
    dtype of those, which saves every product its own conversion.
    """

    feeds_products = False

    def out_dtype(self, x: Tensor) -> torch.dtype:
        return product_dtype(x) if self.feeds_products else x.dtype


class NormConfig(PartConfig, axis="norm"):
    eps: float = Field(1e-5, gt=0)

    def over(self, width: int, sets: int | None = None) -> Norm:
        """The module that normalises vectors of `width` values; with `sets`, that many of them (..., sets, width), each
        with weights of its own."""
        raise NotImplementedError

    def params_over(self, width: int) -> int:
        raise NotImplementedError

    def build(self, ctx: BuildContext) -> Norm:
        return self.over(ctx.d_model)

    def num_params(self, ctx: BuildContext) -> int:
        return self.params_over(ctx.d_model)
