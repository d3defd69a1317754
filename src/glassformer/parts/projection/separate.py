from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.shard import Shard
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Matrix
from glassformer.parts.projection.base import MakeProjection, MapShape, Projection, SelfProjectionConfig


class SeparateQKV(Projection):
    """q = x W_Q^T + b_Q, k = x W_K^T + b_K, v = x W_V^T + b_V: three matmuls, three parameters."""

    def shapes(self, d_model: int) -> dict[str, MapShape]:
        n, g, h = self.heads
        return {
            "q_proj": MapShape(d_model, (n * h,), ("score",), (Shard("column", n),)),
            "k_proj": MapShape(d_model, (g * h,), ("score",), (Shard("column", g),)),
            "v_proj": MapShape(d_model, (g * self.value_dim,), ("hidden",), (Shard("column", g),)),
        }

    def __call__(self, maps: Any, x: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (map_(x) for map_ in (maps.q_proj, maps.k_proj, maps.v_proj))
        return self.by_head(q), self.by_head(k), self.by_head(v, self.value_dim)

    def matrices(self, maps: Any) -> dict[str, Matrix]:
        n, g, _ = self.heads
        named = {"q": (maps.q_proj, n), "k": (maps.k_proj, g), "v": (maps.v_proj, g)}
        return {name: Matrix.of(linear, 0, heads) for name, (linear, heads) in named.items()}


class SeparateQKVConfig(SelfProjectionConfig, kind="separate"):
    def build(self, ctx: BuildContext) -> MakeProjection:
        return partial(SeparateQKV, value_dim=ctx.value_dim)
