from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.forward_pass import Pass
from glassformer.parts.position.base import AttentionPosition, AttentionPositionConfig
from glassformer.parts.position.picture import Plot, some
from glassformer.parts.precision import wide


class Temperature(AttentionPosition):
    """Position encoding by the sharpness of attention: q_p times 1 + share log(1 + floor((p + 1) / every)): later
    queries have sharper patterns, which many keys would blur. Keys have no position. Llama 4 (Meta 2025) in its layers
    without rotary positions, after Nakanishi 2025, 2501.19399."""

    def __init__(self, every: int = 8192, share: float = 0.1):
        super().__init__()
        self.every, self.share = every, share
        self._key = ("temperature", every, share)

    def factors(self, ids: Tensor) -> Tensor:
        """Returns the factor on the query at each position in `ids`, in fp32."""
        return 1.0 + self.share * torch.log1p(torch.floor((ids.float() + 1.0) / self.every))

    def forward(self, q: Tensor, k: Tensor, pass_: Pass) -> tuple[Tensor, Tensor]:
        factors = pass_.once(self._key, lambda: self.factors(pass_.ids)[..., None, None])
        return (wide(q) * factors).to(q.dtype), k

    def picture(self, length: int) -> dict[str, Plot]:
        """Returns a named plot of the factor on queries by position."""
        at = some(length)
        return {"factor by position": Plot("position", "factor", at, self.factors(at)[None], ("q",))}

    def extra_repr(self) -> str:
        return f"every={self.every}, share={self.share:g}"


class TemperatureConfig(AttentionPositionConfig, kind="temperature"):
    """Config of queries that grow with their position: q_p times 1 + share log(1 + floor((p + 1) / every)). It does not
    encode the order by itself: it belongs in some layers, between others with positions, and loses without them."""

    turns: ClassVar[bool] = True
    every: int = Field(8192, gt=0, le=1 << 28)
    share: float = Field(0.1, ge=0)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the factors, which are made once for all layers."""
        return Cost.once(("temperature", self), Cost(kept=shape.keeps_once(shape.s, torch.float32)))

    def build(self, ctx: BuildContext) -> Temperature:
        return Temperature(self.every, self.share)
