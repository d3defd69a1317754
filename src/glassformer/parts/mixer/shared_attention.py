from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.owner import Owner
from glassformer.parts.core.shard import Shard
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import AutoConfig, CallFacts, Kernel, KernelConfig
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.mixer.attend import Sinks, SoftmaxAttention, SoftmaxAttentionConfig, attention_cost, keys_met
from glassformer.parts.mixer.base import MixerChange
from glassformer.parts.mixer.qk_norm import QKNormConfig, norm_of_queries
from glassformer.parts.norm import NormConfig
from glassformer.parts.position import AttentionPosition, AttentionPositionConfig
from glassformer.parts.reparam import MakeReparam
from glassformer.parts.visibility import CausalConfig, Visibility, VisibilityConfig


class SharedAttention(SoftmaxAttention):
    """z = softmax(q k^T / sqrt(h)) v per head, out = z W_O, with the k and v of an earlier layer: it has only W_Q and
    W_O, and no decode state. Brandon et al. 2024, 2405.12981 (CLA); Sun et al. 2024, 2405.05254 (YOCO).

        x (b,s,d) -> q (b,s,n,h) -> norm? -> position -> kernel -> out (b,s,d)
                     k, v (b,t,g,h) of the nearest layer below that shares them as `source`

    The keys are rotated already, so positions and visibility must be those of that layer; `sinks` are separate. Sites:
    q, k, v, scores and pattern (b,n,s,t), z, out; an edit of k or v affects only this layer.
    """

    reads_gathered = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        source: str = "kv",
        bias: bool = False,
        out_bias: bool | None = None,
        position: AttentionPosition | None = None,
        visibility: Visibility | None = None,
        q_norm: nn.Module | None = None,
        scale: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        kernel: Kernel | None = None,
        reparam: MakeReparam | None = None,
    ):
        heads, facts = Heads.of(d_model, n_heads, n_kv_heads, head_dim), CallFacts(sinks=sinks)
        super().__init__(heads, position, visibility, scale, dropout, kernel, facts)
        width, self.source = self.n_heads * self.head_dim, source
        self.q_proj = Linear(d_model, width, bias, "score", reparam, Shard("column", self.n_heads))
        out_bias = bias if out_bias is None else out_bias
        self.output = Linear(width, d_model, out_bias, "output", reparam, Shard("row", self.n_heads))
        self.q_norm = q_norm
        self.sinks = Sinks(self.n_heads) if sinks else None

    def divide(self, owner: Owner) -> None:
        self.divide_heads(owner)

    def forward(self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: None = None) -> Tensor:
        pass_ = pass_ or Pass.of(x)
        x = x if self.enter is None else self.enter(x)
        k, v, k_idx = pass_.shared(("keys", self.source))
        q = self.q_proj(x).unflatten(-1, (self.n_heads, -1))
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.position is not None:
            q, _ = self.position(q, q[:, :, :1], pass_)
        return self.put_out(self.attend(self.call(self.q(q), self.k(k), self.v(v), k_idx, pass_)))

    def matrices(self) -> dict[str, Matrix]:
        """Returns {name: weight matrix} of this mixer; a name is that of the site with the matrix's result."""
        return {"q": Matrix.of(self.q_proj, 0, self.n_heads), "out": Matrix.of(self.output)}

    def init_state(self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0) -> None:
        """Returns None, because this mixer has no decode state: the KV source keeps the keys and values."""


def refuse_in_taker(field: str, value: Any) -> None:
    """Raises RequestError if an attention that is to reuse another layer's keys and values (KV reuser) would lose its
    field `field`: it has a value other than None or False."""
    if value:
        raise RequestError(
            f"mixer.{field}={value}: a layer that takes the keys and values of another cannot set it; leave it out",
            code="conflict", field=f"mixer.{field}", value=value, expected="None",
        )  # fmt: skip


class SharedAttentionConfig(SoftmaxAttentionConfig, kind="shared_attention"):
    """z = softmax(q k^T / sqrt(h)) v with the k and v of the nearest layer below that shares them (`mixer.shares` of an
    attention). Brandon et al. 2024, 2405.12981; Sun et al. 2024, 2405.05254.

    Half of the layers as reusers halve the decode state. It loses quality if layers need different keys, more with more
    reusers per source, and saves in training only the time of W_K and W_V.
    """

    n_heads: int = Field(gt=0, le=1 << 16)
    n_kv_heads: int | None = Field(None, gt=0, le=1 << 16)
    """Number of KV heads of the KV source; None for n_heads."""
    head_dim: int | None = Field(None, gt=0, le=1 << 20)
    """Elements per head; None for d_model / n_heads."""
    source: str = Field("kv", min_length=1, max_length=100)
    """Name under which an earlier layer, the KV source, shares its keys and values."""
    bias: bool = False
    out_bias: bool | None = None
    """True if the output layer W_O has a bias; None for the value of `bias`."""
    position: AttentionPositionConfig | None = None
    """Config of the position encoding, equal to that of the KV source."""
    visibility: VisibilityConfig = CausalConfig()
    """Config of the visibility (attention mask), equal to that of the KV source."""
    q_norm: NormConfig | None = None
    """Config of the norm of each head's queries; None without one."""
    scale: float | None = Field(None, gt=0)
    """Factor on the scores q k^T; None for 1 / sqrt(head_dim), or, under muP, sqrt(base head_dim) / head_dim."""
    sinks: bool = False
    """True if each head has a trained score without a key (a sink), separate from that of the KV source."""
    dropout: float = Field(0.0, ge=0, lt=1)
    kernel: KernelConfig = AutoConfig()

    def changed(self, change: MixerChange, new: Callable[[Any], Any]) -> Any:
        """Returns this config with the property named `change` set to new(old value). Raises RequestError for a
        property of keys or scores that the KV source has and this mixer lacks."""
        if change == "qk_norm":
            return self.replace(q_norm=norm_of_queries(new(self.q_norm and QKNormConfig(norm=self.q_norm))))
        if change not in type(self).model_fields:
            refuse_in_taker(change, new(None))
        return super().changed(change, new)

    def taking(self, name: str) -> SharedAttentionConfig:
        return self.replace(source=name)

    def can_clip_logits(self) -> bool:
        raise RequestError(
            "mixer.kind=shared_attention: its keys are another layer's, which it cannot scale",
            code="unsupported", field="mixer.kind", value="shared_attention",
        )  # fmt: skip

    def build(self, ctx: BuildContext) -> SharedAttention:
        n, g, h = self.heads(ctx)
        inner = self._within(ctx)
        self._check(ctx, g, h)
        return SharedAttention(
            ctx.d_model, n, g, h, self.source, self.bias, self.out_bias,
            position=self.position.build(inner) if self.position else None, visibility=self.visibility.build(inner),
            q_norm=self.q_norm.build(inner.within(width=h)) if self.q_norm else None, scale=self._scale(ctx),
            sinks=self.sinks, dropout=self.dropout, kernel=self.kernel.build(inner), reparam=ctx.make_reparam,
        )  # fmt: skip

    def _check(self, ctx: BuildContext, g: int, h: int) -> None:
        """Raises RequestError if the KV source differs from this mixer in the number g of KV heads, the head width h,
        visibility or position encoding."""
        there = ctx.offered(("keys", self.source))
        mine = (g, h, self.visibility, self.position and self.position.resolved(self._within(ctx)))
        for name, own, other in zip(("n_kv_heads", "head_dim", "visibility", "position"), mine, there, strict=True):
            if own != other:
                raise RequestError(
                    f"mixer.{name}={own} of a layer that takes keys and values as {self.source!r}, and the layer that "
                    f"shares them has {other}; both must agree",
                    code="conflict", field=f"mixer.{name}", value=own, expected=str(other),
                )  # fmt: skip

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the mixer, without keys, values and their state, which count at the KV source."""
        inner, (n, _, h), d = self._within(ctx), self.heads(ctx), ctx.d_model
        total = linear_cost(ctx, shape, d, n * h, bias=self.bias)
        total += linear_cost(ctx, shape.reading(shape.products), n * h, d, bias=self._out_bias)
        total += attention_cost(inner, shape, h, keys_met(self.seen(ctx), shape)) + self._kept(inner, shape)
        total += Cost.weights(n_sinks := n * self.sinks, moved_bytes=shape.reads(n_sinks))
        if self.q_norm is not None:
            heads = Shape(**{**vars(shape.reading(shape.products)), "b": shape.b * n})
            total += self.q_norm.costs(ctx.within(width=h), heads)
        return total + (self.position.costs(inner, shape) if self.position else Cost())

    def _kept(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the tensors kept for the backward pass: q in the form that the kernel reads, and the
        tensors that the kernel keeps."""
        if shape.phase != "train":
            return Cost()
        turned, size = self.position is not None and self.position.turns, ctx.n_heads * ctx.head_dim
        kept, mask = self._call_keeps(ctx, shape, turned, sinks=self.sinks)
        z = size if "z" in kept.given and turned else 0  # z is then laid out as q is, and the output reads a copy
        return Cost(kept=kept.own + shape.keeps(size * ("q" in kept.given) + z)) + mask
