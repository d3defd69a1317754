from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.shard import Shard
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Linear, Matrix
from glassformer.parts.projection.base import MakeProjection, MapShape, Projection, SelfProjectionConfig


class FusedQKV(Projection):
    """q|k|v = x W^T + b, one matmul: W (n h + g h + g hv, d) stacks the rows of W_Q, W_K, W_V."""

    def shapes(self, d_model: int) -> dict[str, MapShape]:
        n, g, h = self.heads
        shards = (Shard("column", n), Shard("column", g), Shard("column", g))
        return {"qkv": MapShape(d_model, (n * h, g * h, g * self.value_dim), ("score", "score", "hidden"), shards)}

    def __call__(self, maps: Any, x: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, Tensor]:
        qkv = maps.qkv
        q, k, v = qkv.split(qkv(x))
        return self.by_head(q), self.by_head(k), self.by_head(v, self.value_dim)

    def stacked(self, maps: Any) -> Linear | None:
        return maps.qkv if type(self) is FusedQKV and self.clip is None else None

    def matrices(self, maps: Any) -> dict[str, Matrix]:
        n, g, _ = self.heads
        named = (("q", n), ("k", g), ("v", g))
        return {name: Matrix.of(maps.qkv, part, heads) for part, (name, heads) in enumerate(named)}


class FusedQKVConfig(SelfProjectionConfig, kind="fused"):
    tensors: ClassVar[tuple[str, ...]] = ("qkv",)

    def build(self, ctx: BuildContext) -> MakeProjection:
        return partial(FusedQKV, value_dim=ctx.value_dim)
