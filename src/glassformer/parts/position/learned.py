from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.base import BuildContext
from glassformer.parts.init import Init
from glassformer.parts.position.base import EmbeddingPosition, EmbeddingPositionConfig, Positions


class Learned(EmbeddingPosition):
    """E_p: one trained row per position, weight (length, d) (GPT-2, BERT). It ends at `length`."""

    def __init__(self, length: int, d_model: int):
        super().__init__()
        self.limit: int = length
        self.weight = nn.Parameter(torch.empty(length, d_model))
        self.init_weights(Init())

    def forward(self, positions: Positions) -> Tensor:
        if positions.end > self.limit:
            raise RequestError(
                f"position=learned ends at {self.limit} tokens and {positions.end} were asked for; use at most "
                f"{self.limit}, or a position that goes on (rope, alibi, sinusoidal)"
            )
        return F.embedding(positions.ids, self.weight)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        init.fill(self.weight, "embedding")


class LearnedConfig(EmbeddingPositionConfig, kind="learned"):
    length: int | None = Field(None, gt=0, le=1 << 28)
    """Rows in the table; None takes the model's context."""

    def _length(self, ctx: BuildContext) -> int:
        return self.length or ctx.context

    def build(self, ctx: BuildContext) -> Learned:
        return Learned(self._length(ctx), ctx.d_model)

    def num_params(self, ctx: BuildContext) -> int:
        return self._length(ctx) * ctx.d_model
