from __future__ import annotations

import math
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext, Reference
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.init import Init, Role
from glassformer.parts.core.owner import Owner
from glassformer.parts.core.shard import Shard, Shards
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel.base import ScoreBias
from glassformer.parts.position.base import AttentionPosition, AttentionPositionConfig
from glassformer.parts.position.picture import Plot


def bucket(distance: Int[Tensor, "*s"], buckets: int, furthest: int, both_sides: bool) -> Int[Tensor, "*s"]:
    """Returns the index of the bucket for each distance k - q: near distances have one bucket each, further ones share
    wider and wider ones.

    Half of the buckets are near; the others grow logarithmically. If bidirectional, half are for keys after the query;
    otherwise these are in bucket 0."""
    first = torch.zeros_like(distance)
    if both_sides:
        buckets //= 2
        first = (distance > 0).long() * buckets
        back = distance.abs()
    else:
        back = (-distance).clamp(min=0)
    near = buckets // 2
    share = (back.float().clamp(min=1) / near).log() / math.log(furthest / near)
    far = near + (share * (buckets - near)).long()
    return first + torch.where(back < near, back, far.clamp(max=buckets - 1))


class RelativeTable(nn.Module):
    """Trained table of relative biases, weight (buckets, n): the bias of each head for each bucket of distances. A call
    returns the table."""

    roles: tuple[Role, ...] = ("embedding",)
    shards: ClassVar[Shards] = {"weight": (Shard("row"),)}

    def __init__(self, buckets: int, n_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets, n_heads))
        self.init_weights(Init())

    def forward(self) -> Float[Tensor, "k n"]:
        return self.weight

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        init.fill(self.weight, "embedding")


class RelativeBias(AttentionPosition):
    """Relative position bias, score + B[bucket(k - q), n]: a learned number per head and bucket of distances. Raffel et
    al. 2020, 1910.10683.

    The table B (buckets, n) may be shared by the layers of a tower (T5) or separate for each layer (UMT5). Half of the
    `buckets` are single distances; the others widen up to `furthest` tokens, beyond which all share one. Distances are
    between slots, or between given positions.
    """

    def __init__(self, table: nn.Module | Reference, furthest: int = 128, both_sides: bool = False):
        super().__init__()
        self.table, self.furthest, self.both_sides = table, furthest, both_sides

    def take_share(self, owner: Owner) -> None:
        """Changes nothing, because the table has already been divided by heads."""

    def bias(self, pass_: Pass) -> ScoreBias:
        weight, given = self.table(), pass_.given
        buckets, furthest, both_sides = len(weight), self.furthest, self.both_sides

        def add(score: Tensor, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
            if given is not None:
                last = given.shape[1] - 1  # an empty slot of a state counts as a future token
                q_idx, k_idx = given[b, q_idx.clamp(max=last)], given[b, k_idx.clamp(max=last)]
            return score + weight[bucket(k_idx - q_idx, buckets, furthest, both_sides), n].to(score.dtype)

        return ScoreBias(add, True, ("relative_bias", furthest, both_sides, given is None), (weight,))

    @torch.no_grad()
    def picture(self, length: int) -> dict[str, Plot]:
        """Returns named plots of B by distance, a line for each head, and of the bucket of each distance."""
        first = 1 - length if self.both_sides else 0
        back = torch.arange(first, length)
        weight = self.table().float().cpu()
        which = bucket(-back, len(weight), self.furthest, self.both_sides)
        heads = tuple(f"head {n}" for n in range(weight.shape[1]))
        return {
            "bias by distance": Plot("distance", "bias", back, weight[which].T, heads),
            "bucket by distance": Plot("distance", "bucket", back, which[None].float(), ("bucket",)),
        }

    def extra_repr(self) -> str:
        return f"furthest={self.furthest}, both_sides={self.both_sides}"


class RelativeBiasConfig(AttentionPositionConfig, kind="relative_bias", words="relbias"):
    biases: ClassVar[bool] = True
    buckets: int = Field(32, ge=4, le=1 << 16)
    furthest: int = Field(128, gt=1, le=1 << 28)
    """Distance in tokens beyond which all tokens share one bucket."""
    both_sides: bool | None = None
    """True for separate buckets for keys after the query, as in an encoder; None to have them if tokens attend to later
    tokens."""
    shared: bool = True
    """True if all layers of a tower share one table."""

    def _two_sided(self, ctx: BuildContext) -> bool:
        return ctx.sees_later if self.both_sides is None else self.both_sides

    def _key(self, ctx: BuildContext) -> tuple[object, ...]:
        return ("relative_bias", ctx.tower, ctx.n_heads, self.buckets, self.furthest, self._two_sided(ctx))

    def build(self, ctx: BuildContext) -> RelativeBias:
        both_sides = self._two_sided(ctx)
        near = self.buckets // (4 if both_sides else 2)
        if near >= self.furthest:
            raise RequestError(
                f"position.furthest={self.furthest} is one of the {near} distances with separate buckets; "
                f"use {near + 1} or more, or fewer buckets",
                code="range", field="position.furthest", value=self.furthest, expected=f"> {near}",
            )  # fmt: skip

        def make() -> RelativeTable:
            return RelativeTable(self.buckets, ctx.n_heads)

        table = ctx.shared(self._key(ctx), make) if self.shared else make()
        return RelativeBias(table, self.furthest, both_sides)

    def resolved(self, ctx: BuildContext) -> RelativeBiasConfig:
        return self.replace(both_sides=self._two_sided(ctx))

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        table = Cost.weights(self.buckets * ctx.n_heads)
        return Cost.once(self._key(ctx), table) if self.shared else table
