from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import Field
from torch import Tensor

from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.shard import Shard
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Matrix
from glassformer.parts.projection.base import MapShape, MemoryProjectionConfig, Projection


class CrossQKV(Projection):
    """q = x W_Q^T + b_Q of x (b,s,d); k|v = m W^T + b of another sequence m (b,t,m), the pass's memory."""

    def __init__(self, heads: Heads, clip: float | None = None, memory_width: int | None = None):
        super().__init__(heads, clip)
        self.memory_width = memory_width

    def shapes(self, d_model: int) -> dict[str, MapShape]:
        n, g, h = self.heads
        by_group = Shard("column", g)
        return {
            "q_proj": MapShape(d_model, (n * h,), ("score",), (Shard("column", n),)),
            "kv_proj": MapShape(
                self.memory_width or d_model, (g * h, g * h), ("score", "hidden"), (by_group, by_group)
            ),
        }

    def __call__(self, maps: Any, x: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, Tensor]:
        return self.queries(maps, x), *self.keys_values(maps, pass_.need_memory().x)

    def queries(self, maps: Any, x: Tensor) -> Tensor:
        """Returns the queries (b, s, n, h) of x (b, s, d)."""
        return self.by_head(maps.q_proj(x))

    def keys_values(self, maps: Any, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values, each (b, t, g, h), of a memory (b, t, m)."""
        kv = maps.kv_proj
        k, v = kv.split(kv(memory))
        return self.by_head(k), self.by_head(v)

    def matrices(self, maps: Any) -> dict[str, Matrix]:
        n, g, _ = self.heads
        return {
            "q": Matrix.of(maps.q_proj, 0, n),
            "k": Matrix.of(maps.kv_proj, 0, g),
            "v": Matrix.of(maps.kv_proj, 1, g),
        }


MakeCrossProjection = Callable[..., CrossQKV]
"""Function of (heads, clip) that returns a projection with keys and values from another sequence."""


class CrossQKVConfig(MemoryProjectionConfig, kind="cross"):
    memory_width: int | None = Field(None, gt=0, le=1 << 20)
    """Width m of the memory; None for the encoder's, or d_model without an encoder."""

    def build(self, ctx: BuildContext) -> MakeCrossProjection:
        return partial(CrossQKV, memory_width=self.memory_width or ctx.memory_width)
