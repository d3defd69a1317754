from __future__ import annotations

from typing import Any

import torch
from pydantic import model_validator
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import AttentionCall, CallFacts
from glassformer.parts.kernel.base import pattern_bytes
from glassformer.parts.mixer.attention import Attention, AttentionConfig
from glassformer.parts.mixer.kv import KVState
from glassformer.parts.reparam import MakeReparam
from glassformer.parts.visibility import Bidirectional, Longformer, SameDocument

TWO_SIDED = "visibility of kind longformer with causal=false"


class GlobalAttention(Attention):
    """`Attention` under a two-sided `Longformer` whose global tokens have separate projections. Beltagy et al. 2020
    (2004.05150), 3.1.

        z_i = softmax(q_i K^T) V      over the keys that i attends to: its window, and the global tokens
        z_i = softmax(q'_i K'^T) V'   over its whole document, for the global tokens: the first ones of a document, or
                                      those that the caller of the model names (`global_tokens`); with globals=0
                                      only these, as in the published class

    q', K', V' come from separate layers, `global_maps`, of the shapes of q, K and V. Scores and pattern are those of
    the first line. It cannot decode, because every token attends to future tokens.
    """

    def own(self, d_model: int, bias: bool, reparam: MakeReparam | None) -> None:
        seen = self.visibility
        if not isinstance(seen, Longformer) or seen.causal:
            raise RequestError(code="conflict", field="mixer.visibility", value=type(seen).__name__, expected=TWO_SIDED)
        self.first = seen.globals
        self.global_maps = nn.ModuleDict(self.projection.maps(d_model, bias, reparam))

    def mixed(self, x: Tensor, pass_: Pass, state: KVState | None = None) -> Tensor:
        z = super().mixed(x, pass_, state)
        if not self.first and pass_.global_tokens is None:
            return z
        q, k, v = self.projection(self.global_maps, x, pass_)
        for adjust in self._adjust:
            q, k = adjust(q, k, pass_)
        k, v = self.projection.expand(self.global_maps, k, v)
        if pass_.documents is None and pass_.global_tokens is None:
            first = min(self.first, x.shape[1])
            rows = torch.arange(first, device=x.device)
            found = self.kernel(self._call(q[:, :first], k, v, rows, pass_))
            return torch.cat((found, z[:, first:]), dim=1)
        is_global = (pass_.age < self.first).expand(x.shape[:2]) if (t := pass_.global_tokens) is None else t.bool()
        if not (most := int(is_global.sum(1).max())):
            return z
        rows = is_global.int().argsort(dim=1, descending=True, stable=True)[:, :most]  # (b, m), some of them not global
        row = torch.arange(len(x), device=x.device)[:, None]
        found = self.kernel(self._call(q[row, rows], k, v, rows, pass_))
        chosen = torch.where(is_global.gather(1, rows)[..., None, None], found, z[row, rows])
        return z.index_put((row, rows), chosen)

    def _call(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, pass_: Pass) -> AttentionCall:
        documents = pass_.documents
        everything = Bidirectional()
        seen = everything if documents is None else SameDocument(everything, documents, pass_.borders)
        return self.call(q, k, v, None, pass_).replace(visibility=seen, index=(rows, pass_.slots))

    def init_state(self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0) -> KVState:
        raise RequestError("global attention is bidirectional, so it cannot decode", code="causal", field="mixer")


class GlobalAttentionConfig(AttentionConfig, kind="global_attention"):
    """Config of Longformer's attention as published, for encoders: z_i = softmax(q'_i K'^T) V' for the first tokens of
    a document, with separate projections, and the window and those tokens for all others. Beltagy et al. 2020
    (2004.05150).

    It loses to full attention if texts are short enough for that, and costs 1.75 times its projections' weights.
    """

    @model_validator(mode="after")
    def _two_sided(self) -> GlobalAttentionConfig:
        seen: Any = self.visibility
        if seen.kind != "longformer" or seen.causal:
            raise RequestError(
                f"global_attention needs a {TWO_SIDED}", code="conflict", field="visibility", value=seen.kind
            )
        return self

    def module(self) -> type[Attention]:
        return GlobalAttention

    def sharing(self, name: str) -> None:
        """Returns None, because this mixer cannot be a KV source: it has two sets of keys and values."""

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        inner, seen = self._of_projection(ctx), self.visibility.build(ctx)
        assert isinstance(seen, Longformer)
        first = min(seen.globals, shape.t)
        if not first:  # only the caller's tokens, which a config does not know
            return super().costs(ctx, shape) + Cost.weights(self.projection.costs(inner, shape).parameters)
        calls = 2 * shape.passes * shape.b * first * shape.t * inner.n_heads
        projected = self.projection.costs(inner, shape)
        turned = shape.keeps(2 * inner.n_kv_heads * inner.head_dim)
        flops = calls * (inner.head_dim + self._projection(ctx).value_dim)
        again = shape.keeps(ctx.d_model) if shape.inputs == shape.products else 0  # of x, read by both projections
        return (
            super().costs(ctx, shape)
            + projected
            + Cost(flops=flops, kept=turned - again + self._global(inner, shape, first))
        )

    def _global(self, ctx: BuildContext, shape: Shape, first: int) -> int:
        """Returns the bytes that attention of the `first` global tokens of each sequence keeps for the backward pass:
        their queries, and their pattern."""
        if shape.phase != "train":
            return 0
        facts = CallFacts(dtype=shape.products, dropout=self.dropout > 0, additive=self.softcap is None)
        pattern = pattern_bytes(facts, shape.b * ctx.n_heads * first * shape.t) + first * (shape.t + 1)
        return pattern + shape.keeps_once(shape.b * first * ctx.n_heads * ctx.head_dim)

    def _state(self, ctx: BuildContext, shape: Shape) -> Cost:
        return Cost()
