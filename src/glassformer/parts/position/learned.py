from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.init import Init, Role
from glassformer.parts.core.shard import REPLICATED, Shards
from glassformer.parts.forward_pass import Pass
from glassformer.parts.position.base import EmbeddingPosition, EmbeddingPositionConfig
from glassformer.parts.position.picture import MOST_POINTS, Plot, by_distance


class Learned(EmbeddingPosition):
    """Trained position encoding E_{p + offset}: one row per position, weight (length + offset, d) (GPT-2, BERT). The
    limit is `length`.

    OPT's table starts with `offset` = 2 rows that no token of a text uses.
    """

    roles: tuple[Role, ...] = ("embedding",)
    shards: ClassVar[Shards] = {"weight": (REPLICATED,)}

    def __init__(self, length: int, d_model: int, offset: int = 0):
        super().__init__()
        self.limit: int = length
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(length + offset, d_model))
        self.init_weights(Init())

    def forward(self, pass_: Pass) -> Tensor:
        if pass_.end > self.limit:
            raise RequestError(
                f"position=learned ends at {self.limit} tokens and {pass_.end} were asked for; use at most "
                f"{self.limit}, or positions without a limit (rope, alibi, sinusoidal)",
                code="range", field="tokens", value=pass_.end,
            )  # fmt: skip
        if pass_.given is not None and pass_.ids.numel():
            least, most = (int(end) for end in pass_.ids.aminmax())
            if least < 0 or most >= self.limit:
                wrong = least if least < 0 else most
                raise RequestError(
                    f"position=learned knows positions 0 to {self.limit - 1}, and {wrong} was given",
                    code="range", field="positions", value=wrong,
                )  # fmt: skip
        return F.embedding(pass_.ids + self.offset if self.offset else pass_.ids, self.weight)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        init.fill(self.weight, "embedding")

    @torch.no_grad()
    def picture(self, length: int) -> dict[str, Plot]:
        """Returns named plots of cos(E_p, E_p'), of its mean over all pairs k apart, and of |E_p|, which shows rows
        that were never trained."""
        step = -(-min(length, self.limit) // MOST_POINTS)
        rows = self.weight[self.offset :][: min(length, self.limit) : step].float().cpu()
        at = torch.arange(len(rows)) * step
        cosine = F.normalize(rows, dim=-1) @ F.normalize(rows, dim=-1).T
        return {
            "cosine of positions": Plot("position", "position", at, cosine),
            "mean cosine by distance": Plot("distance", "cosine", at, by_distance(cosine)[None], ("mean",)),
            "norm by position": Plot("position", "norm", at, rows.norm(dim=-1)[None], ("|E_p|",)),
        }

    def extra_repr(self) -> str:
        return f"length={self.limit}"


class LearnedConfig(EmbeddingPositionConfig, kind="learned", words="learned"):
    length: int | None = Field(None, gt=0, le=1 << 28)
    """Number of positions; None for the model's context."""
    offset: int = Field(0, ge=0, le=1 << 16)
    """Number of rows of the table before that of position 0."""

    def _length(self, ctx: BuildContext) -> int:
        return self.length or ctx.context

    def limit(self, ctx: BuildContext) -> int:
        return self._length(ctx)

    def resolved(self, ctx: BuildContext) -> LearnedConfig:
        return self.replace(length=self._length(ctx))

    def build(self, ctx: BuildContext) -> Learned:
        return Learned(self._length(ctx), ctx.d_model, self.offset)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        return Cost.weights((self._length(ctx) + self.offset) * ctx.d_model)
