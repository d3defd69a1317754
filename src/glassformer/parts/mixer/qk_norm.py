from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext, Value
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.owner import Owner
from glassformer.parts.forward_pass import Pass
from glassformer.parts.norm import NormConfig, RMSNormConfig

Over = Literal["head", "each_head", "full"]


class QKNorm(nn.Module):
    """Norm of queries and keys before their product, which bounds the scores (Henry et al. 2020, 2010.04245).

    `over="head"`: each head's h values, weights shared by the heads (Qwen3); `over="each_head"`: each head, with
    separate weights for every head (Cohere, StableLM); `over="full"`: all n h values at once (OLMo 2).
    """

    def __init__(self, q_norm: nn.Module, k_norm: nn.Module, over: Over = "head", after_position: bool = False):
        """`after_position`: True if the mixer applies the norm after the position encoding; False for before."""
        super().__init__()
        self.q_norm, self.k_norm, self.after_position = q_norm, k_norm, after_position
        self.full = over == "full"

    def take_share(self, owner: Owner) -> None:
        owner.refuse("qknorm:full", self.full, "norms the values of all heads at once")

    def forward(self, q: Tensor, k: Tensor, pass_: Pass) -> tuple[Tensor, Tensor]:
        if self.full:
            return self.q_norm(q.flatten(-2)).view_as(q), self.k_norm(k.flatten(-2)).view_as(k)
        return self.q_norm(q), self.k_norm(k)


class QKNormConfig(Value):
    norm: NormConfig = RMSNormConfig()
    over: Over = "head"
    after_position: bool = False

    def build(self, ctx: BuildContext) -> QKNorm:
        q, k = (self.norm.build(inner) for inner in self._within(ctx))
        return QKNorm(q, k, self.over, self.after_position)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the norms of q and of k; keeping their inputs is counted with the attention."""
        heads, shape = (ctx.n_heads, ctx.n_kv_heads), shape.reading(shape.products)
        vectors = [replace(shape, b=shape.b * n) if self.over == "head" else shape for n in heads]
        norms = [self.norm.costs(inner, each) for inner, each in zip(self._within(ctx), vectors, strict=True)]
        return sum(norms, Cost(kept=-shape.keeps(sum(heads) * ctx.head_dim)))

    def _within(self, ctx: BuildContext) -> list[BuildContext]:
        """Returns the contexts in which the norm of q and the norm of k are built."""
        h = ctx.head_dim
        return [
            ctx.within(width=n * h if self.over == "full" else h, sets=n if self.over == "each_head" else None)
            for n in (ctx.n_heads, ctx.n_kv_heads)
        ]


def norm_of_queries(qk_norm: QKNormConfig | None) -> NormConfig | None:
    """Returns the config of the norm of queries in `qk_norm`, for a layer that reuses the keys of another layer; None
    without a norm. Raises RequestError if this norm cannot be applied to only queries."""
    if qk_norm is None:
        return None
    if qk_norm.over != "head" or qk_norm.after_position:
        raise RequestError(
            "mixer.qk_norm: a layer that takes the keys of another norms each head's queries, before their "
            "positions; use qknorm:head",
            code="conflict", field="mixer.qk_norm", value=qk_norm, expected="qknorm:head",
        )  # fmt: skip
    return qk_norm.norm
