from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from glassformer.parts.base import BuildContext, PartConfig
from glassformer.parts.norm import NormConfig
from glassformer.parts.site import Site

Branch = Callable[[Tensor], Tensor]


class Residual(nn.Module):
    """forward(x, mixer, ffn) -> x': the whole wiring of one block; `ffn` is None in a block without one.

    x (b, s, d). Owns the norms; `mid` is the stream between the two branches, where there is such a place.
    """

    transparent = True
    """Its children are named as if they were the block's own."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout
        self.resid_mid = Site()

    def drop(self, branch: Tensor) -> Tensor:
        return F.dropout(branch, self.dropout, self.training) if self.dropout else branch

    @staticmethod
    def feeding(norm: nn.Module | None) -> None:
        """Tells a norm that only matrix products read what it makes."""
        if norm is not None:
            norm.feeds_products = True  # type: ignore[assignment]

    def forward(self, x: Tensor, mixer: Branch, ffn: Branch | None) -> Tensor:
        raise NotImplementedError


class ResidualConfig(PartConfig, axis="residual"):
    dropout: float = Field(0.0, ge=0, lt=1)
    """On each branch's result."""

    norms: ClassVar[tuple[str, ...]] = ("mixer_norm", "ffn_norm")
    """Names of the norms this wiring holds in a block with both branches."""

    def norm_names(self, has_ffn: bool) -> tuple[str, ...]:
        return self.norms if has_ffn else tuple(name for name in self.norms if not name.startswith("ffn"))

    def wire(self, ctx: BuildContext, norm: NormConfig, has_ffn: bool) -> Residual:
        raise NotImplementedError

    def wire_params(self, ctx: BuildContext, norm: NormConfig, has_ffn: bool) -> int:
        return len(self.norm_names(has_ffn)) * norm.num_params(ctx)

    def _norms(self, ctx: BuildContext, norm: NormConfig, has_ffn: bool) -> dict[str, nn.Module]:
        return {name: norm.build(ctx) for name in self.norm_names(has_ffn)}
