from __future__ import annotations

from functools import partial
from typing import Any, get_args

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts import fused_products
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.owner import Owner
from glassformer.parts.core.shard import Shard
from glassformer.parts.core.site import Site, unseen
from glassformer.parts.core.words import Word, positive, whole
from glassformer.parts.forward_pass import Pass
from glassformer.parts.fused_products import FusedPart
from glassformer.parts.kernel import (
    AutoConfig,
    CallFacts,
    Kernel,
    KernelConfig,
    ScoreBias,
    softcap,
)
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.mixer.attend import Sinks, SoftmaxAttention, SoftmaxAttentionConfig, attention_cost, keys_met
from glassformer.parts.mixer.base import DotProduct
from glassformer.parts.mixer.kv import KVState, state_of
from glassformer.parts.mixer.qk_norm import Over, QKNorm, QKNormConfig, norm_of_queries
from glassformer.parts.mixer.shared_attention import SharedAttentionConfig, refuse_in_taker
from glassformer.parts.norm import Norm, NormConfig, RMSNormConfig
from glassformer.parts.position import AttentionPosition, AttentionPositionConfig
from glassformer.parts.projection import FusedQKV, FusedQKVConfig, MakeProjection, Projection, SelfProjectionConfig
from glassformer.parts.reparam import MakeReparam
from glassformer.parts.visibility import CausalConfig, Visibility, VisibilityConfig


class Attention(SoftmaxAttention):
    """z = softmax(q k^T / sqrt(h) + bias) v per head, out = z W_O. Vaswani et al. 2017, 1706.03762.

    n query heads share g KV heads: g = n is MHA, g = 1 MQA (1911.02150), between them GQA (2305.13245).

        x (b,s,d) -> project -> qk_norm? -> position -> state? -> kernel -> out (b,s,d)
                     q (b,s,n,h)  k,v (b,s,g,h)           k,v (b,t,g,h)  z (b,s,n,h)

    `projection` makes q, k and v and bounds every |q|, |k|, |v| by its `clip` (MPT). `qk_norm` comes before the
    position, or after it with its `after_position`. Sites: q, k, v after both, scores and pattern (b,n,s,t), z, out.

    With `gain_control`, z is attention minus uniform attention: z_s minus the mean of v over the visible keys of s, so
    that no part is common to all tokens (rank collapse). Giorlandino & Goldt, 2505.24333, subtract the mean of z over
    the sequence, which the mean of v approaches for many tokens; the mean of v needs no future tokens, and only a cache
    of values. Gain control doubles the cost of attention. The site z is the difference; pattern and scores are those of
    the softmax.

    With `sinks`, a learned number per head is an additional score in each softmax, whose weight is dropped (gpt-oss;
    Agarwal et al. 2025, 2508.10925): a head without a match need not attend to the first token. With its initial 0 the
    softmax is e^s / (1 + sum e^s). The rows of the pattern then sum to less than 1.

    Values may have another width than queries and keys, `projection.value_dim` = hv (d_v in Vaswani et al.): v
    (b,s,g,hv), z (b,s,n,hv), and W_O (d, n hv).

    With `gated`, z is multiplied elementwise by sigmoid(x W_gate) (Qwen3-Next; Qiu et al. 2025, 2505.06708). The site
    gate (b,s,n,h) is x W_gate, and z the product.
    """

    reads_gathered = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        position: AttentionPosition | None = None,
        visibility: Visibility | None = None,
        qk_norm: QKNorm | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        projection: MakeProjection = FusedQKV,
        gain_control: bool = False,
        sinks: bool = False,
        gated: bool = False,
        dropout: float = 0.0,
        kernel: Kernel | None = None,
        reparam: MakeReparam | None = None,
        shares: str | None = None,
    ):
        heads = Heads.of(d_model, n_heads, n_kv_heads, head_dim)
        facts = CallFacts(additive=softcap is None, sinks=sinks)
        super().__init__(heads, position, visibility, scale, dropout, kernel, facts)
        self.softcap, self.gain_control, self.shares = softcap, gain_control, shares
        self.projection = projection(heads)
        for name, module in self.projection.maps(d_model, bias, reparam).items():
            self.add_module(name, module)
        self.qk_norm = qk_norm
        width, out_bias = self.n_heads * self.projection.value_dim, bias if out_bias is None else out_bias
        self.output = Linear(width, d_model, out_bias, "output", reparam, Shard("row", self.n_heads))
        cut = Shard("column", self.n_heads)
        self.gate_proj = Linear(d_model, width, bias, reparam=reparam, shard=cut) if gated else None
        self.gate = Site("bsnh") if gated else None
        self.sinks = Sinks(self.n_heads) if sinks else None
        steps = (position, qk_norm) if qk_norm is not None and qk_norm.after_position else (qk_norm, position)
        self._adjust = [step for step in steps if step is not None]
        self.own(d_model, bias, reparam)

    def own(self, d_model: int, bias: bool, reparam: MakeReparam | None) -> None:
        """Adds the modules and parameters of a subclass; called at the end of the constructor, empty by default.

        d_model      width of x
        bias         True if linear layers have a bias
        reparam      reparametrisation, for `Linear(..., reparam=reparam)`; None for plain weights

        `init_weights` of the subclass fills the parameters, and `costs` of its config counts them."""

    def divide(self, owner: Owner) -> None:
        self.divide_heads(owner)
        self.projection = self.projection.of_owner(owner)

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: KVState | None = None
    ) -> Float[Tensor, "b s d"]:
        """Returns z W_O (b, s, d) for x (b, s, d). With a decode state, the s tokens follow the tokens that the state
        has read, and are added to it."""
        x, pass_ = x if self.enter is None else self.enter(x), pass_ or Pass.of(x)
        at_once = self._at_once(x, pass_) if state is None else None
        if at_once is not None:
            return at_once(x)
        z = self.mixed(x, pass_, state)
        if self.gate_proj is not None and self.gate is not None:
            z = z * torch.sigmoid(self.gate(self.gate_proj(x).unflatten(-1, (self.n_heads, -1))))
        return self.put_out(z)

    def added_at_once(self, x: Tensor, norm: Norm, pass_: Pass) -> FusedPart | None:
        return None if self.enter is not None else self._at_once(x, pass_, norm)

    def _at_once(self, x: Tensor, pass_: Pass, norm: Norm | None = None) -> FusedPart | None:
        """Returns attention without further parts, or with a norm x + output of norm(x), as a fused part of a training
        step; None if this mixer, this pass or the machine needs separate operations."""
        further = self.qk_norm, self.softcap, self.gate_proj, self.sinks, self.shares
        varied = type(self) is not Attention or self.gain_control or any(one is not None for one in further)
        layer = self.projection.stacked(self)
        if varied or layer is None or not torch.is_grad_enabled() or (self.training and self.dropout):
            return None
        rotation = None if self.position is None else self.position.pair_rotation(pass_)
        if self.position is not None and (rotation is None or self.position.bias(pass_) is not None):
            return None
        seen = pass_.seen(self.visibility)
        facts = CallFacts.of_loops(x.shape[0], x.shape[1], self.head_dim, seen)
        if pass_.tokens != pass_.end or not self.kernel.in_loops(facts):
            return None
        heads = (*self.heads, self.projection.value_dim)
        return fused_products.mix(self, x, (layer, self.output), heads, seen.causal, self.scale, rotation, norm)

    def mixed(self, x: Tensor, pass_: Pass, state: KVState | None = None) -> Tensor:
        """Returns z (b, s, n, hv) of x (b, s, d), before the gate, the site `z` and the output layer W_O."""
        q, k, v = self.adjusted(x, pass_)
        q, k, v = self.q(q), self.k(k), self.v(v)
        k_idx = None
        if state is not None:
            k, v, k_idx = state.append(k, v, pass_)  # (b, t, g, h)
        k, v = self.projection.expand(self, k, v)
        if self.shares is not None:
            pass_.share(("keys", self.shares), (k, v, k_idx))
        call = self.call(q, k, v, k_idx, pass_)
        z = self.attend(call)
        if self.gain_control:
            z = z - self.kernel(call.replace(q=torch.zeros_like(q), bias=None, dropout=0.0, sinks=None))
        return z

    def adjusted(self, x: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q (b, s, n, h), k and v (b, s, g, h) of x (b, s, d), after norm and position."""
        if self.qk_norm is None and self.position is not None and torch.is_grad_enabled() and unseen(self.position):
            rotation = self.position.pair_rotation(pass_)
            layer = self.projection.stacked(self)
            if rotation is not None and layer is not None:
                heads = (*self.heads, self.projection.value_dim)
                made = fused_products.project(layer, x, heads, rotation)
                if made is not None:
                    return made
        q, k, v = self.projection(self, x, pass_)
        for adjust in self._adjust:
            q, k = adjust(q, k, pass_)
        return q, k, v

    @property
    def dot_product(self) -> DotProduct:
        maps = self.matrices()
        return DotProduct(self.q, self.k, self.scale, self.visibility, maps["q"], maps["k"])

    def matrices(self) -> dict[str, Matrix]:
        """Returns {name: weight matrix} of this mixer; a name is that of the site with the matrix's result."""
        gate = {} if self.gate_proj is None else {"gate": Matrix.of(self.gate_proj, heads=self.n_heads)}
        return {**self.projection.matrices(self), **gate, "out": Matrix.of(self.output)}

    def score_bias(self, pass_: Pass) -> ScoreBias | None:
        bias = super().score_bias(pass_)
        return bias if self.softcap is None else ScoreBias.chain(softcap(self.softcap), bias)

    def init_state(self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0) -> KVState:
        return state_of(self.visibility, self.projection.kept_shapes, batch, max_len, dtype, device, rewind)


def _qk_norm(old: QKNormConfig | None, norm: NormConfig, over: Any = None) -> QKNormConfig:
    new = old or QKNormConfig(norm=RMSNormConfig(eps=norm.eps))
    return new.replace(over=over or new.over)


def _read_qk_norm(word: str, text: str) -> dict[str, Any]:
    if text not in get_args(Over):
        raise RequestError(
            f"{word}:{text}: use qknorm, qknorm:head, qknorm:each_head or qknorm:full",
            code="unknown", field=word, value=text,
        )  # fmt: skip
    return {"qk_norm": partial(_qk_norm, over=text)}


_WORDS = (
    Word("mha", fields={"n_kv_heads": None}, change="n_kv_heads"),
    Word("mqa", fields={"n_kv_heads": 1}, change="n_kv_heads"),
    Word("gqa", whole("n_kv_heads"), "2", change="n_kv_heads"),
    Word("softcap", positive("softcap"), "50", change="softcap"),
    Word("gain", fields={"gain_control": True}, change="gain_control"),
    Word("sinks", fields={"sinks": True}, change="sinks"),
    Word("qknorm", _read_qk_norm, "full", optional=True, fields={"qk_norm": _qk_norm}, change="qk_norm"),
)  # fmt: skip
"""Short names (`+mqa`, `+gqa:2`) that change one property of all mixers that have the property, such as the number of
KV heads."""


class AttentionConfig(SoftmaxAttentionConfig, kind="attention", words=_WORDS):
    n_heads: int = Field(gt=0, le=1 << 16)
    n_kv_heads: int | None = Field(None, gt=0, le=1 << 16)
    """Number of KV heads; None for n_heads."""
    head_dim: int | None = Field(None, gt=0, le=1 << 20)
    """Elements per head; None for d_model / n_heads."""
    value_dim: int | None = Field(None, gt=0, le=1 << 20)
    """Elements per head of the values v and of z, hv (d_v in the paper); None for head_dim."""
    bias: bool = False
    out_bias: bool | None = None
    """True if the output layer W_O has a bias; None for the value of `bias`."""
    position: AttentionPositionConfig | None = None
    visibility: VisibilityConfig = CausalConfig()
    qk_norm: QKNormConfig | None = None
    softcap: float | None = Field(None, gt=0)
    scale: float | None = Field(None, gt=0)
    """Factor on the scores q k^T; None for 1 / sqrt(head_dim), or, under muP, sqrt(base head_dim) / head_dim."""
    clip: float | None = Field(None, gt=0)
    """Bound c of q, k and v, whose elements the projection clamps to [-c, c]; None without a bound."""
    projection: SelfProjectionConfig = FusedQKVConfig()
    gain_control: bool = False
    sinks: bool = False
    """True if each head has a trained score without a key (a sink), so that the head need not attend to any token."""
    gated: bool = False
    """True if z is gated elementwise: z sigmoid(x W_gate)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    kernel: KernelConfig = AutoConfig()
    shares: str | None = Field(None, min_length=1, max_length=100)
    """Name under which later layers may reuse the keys and values of this layer (`shared_attention`); None if it does
    not share them."""

    def module(self) -> type[Attention]:
        """Returns the class of the module that this config builds."""
        return Attention

    def _of_projection(self, ctx: BuildContext) -> BuildContext:
        """Returns the context in which the projection of this mixer is built."""
        return self._within(ctx).within(value_dim=self.value_dim)

    def resized(self, n_heads: int) -> Any:
        return super().resized(n_heads).replace(value_dim=None)

    def resolved(self, ctx: BuildContext) -> Any:
        new = super().resolved(ctx)
        return new.replace(value_dim=None if new.value_dim == new.head_dim else new.value_dim)

    def _projection(self, ctx: BuildContext) -> Projection:
        return self.projection.build(self._of_projection(ctx))(self.heads(ctx), clip=self.clip)

    def divided(self, ctx: BuildContext, owners: int) -> AttentionConfig:
        n, g, h = self.heads(ctx)
        return self.replace(n_heads=n // owners, n_kv_heads=g // owners, head_dim=h)

    def sharing(self, name: str) -> AttentionConfig | None:
        return self.replace(shares=name)

    def taking(self, name: str) -> SharedAttentionConfig:
        for field in ("softcap", "clip", "gain_control", "gated", "value_dim"):
            refuse_in_taker(field, getattr(self, field))
        kept = ("n_heads", "n_kv_heads", "head_dim", "bias", "out_bias", "position", "visibility", "scale", "dropout")
        return SharedAttentionConfig(
            **{name: getattr(self, name) for name in (*kept, "kernel", "sinks")}, source=name,
            q_norm=norm_of_queries(self.qk_norm),
        )  # fmt: skip

    def can_clip_logits(self) -> bool:
        if self.qk_norm is not None:
            raise RequestError(
                "qk_norm undoes every scale of W_q and W_k; use one of them", code="conflict", field="mixer.qk_norm"
            )
        if self.clip is not None:
            raise RequestError(
                f"mixer.clip={self.clip:g} bounds q and k after W_q and W_k; use one of them",
                code="conflict", field="mixer.clip", value=self.clip,
            )  # fmt: skip
        return True

    def build(self, ctx: BuildContext) -> Attention:
        n, g, h = self.heads(ctx)
        inner = self._of_projection(ctx)
        if self.shares is not None:
            ctx.offer(("keys", self.shares), (g, h, self.visibility, self.position and self.position.resolved(inner)))
        return self.module()(
            ctx.d_model, n, g, h, self.bias, out_bias=self.out_bias,
            position=self.position.build(inner) if self.position else None,
            visibility=self.visibility.build(inner),
            qk_norm=self.qk_norm.build(inner) if self.qk_norm else None,
            softcap=self.softcap, scale=self._scale(ctx),
            projection=partial(self.projection.build(inner), clip=self.clip),
            gain_control=self.gain_control, gated=self.gated, sinks=self.sinks,
            dropout=self.dropout, kernel=self.kernel.build(inner), reparam=ctx.make_reparam, shares=self.shares,
        )  # fmt: skip

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        inner, projection = self._of_projection(ctx), self._projection(ctx)
        width, keys = projection.value_dim, keys_met(self.seen(inner), shape)
        core = attention_cost(inner, shape, width, keys, 2 if self.gain_control else 1)
        output = linear_cost(ctx, shape.reading(shape.products), self.n_heads * width, ctx.d_model, bias=self._out_bias)
        own = core + output + self._kept(inner, shape) + self._state(inner, shape)
        own += Cost.weights(n_sinks := self.n_heads * self.sinks, moved_bytes=shape.reads(n_sinks))
        if self.gated:  # it reads the input of the projection
            gate = linear_cost(ctx, shape, ctx.d_model, self.n_heads * width, bias=self.bias)
            own += gate + Cost(kept=-shape.keeps(ctx.d_model if shape.inputs == shape.products else 0))
        parts = [part for part in (self.projection, self.qk_norm, self.position) if part is not None]
        return sum((part.costs(inner, shape) for part in parts), own)

    def _kept(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the tensors kept for the backward pass: the projected q, k and v, as far as a part of
        their tensor is read; q and k in the form that the kernel reads; and the tensors that the kernel keeps."""
        if shape.phase != "train":
            return Cost()
        turned, normed = self.position is not None and self.position.turns, self.qk_norm is not None
        turned = turned and not self.at_once(ctx, shape)  # which turns q and k in place
        value_dim = self._projection(ctx).value_dim
        facts = {"additive": self.softcap is None, "sinks": self.sinks}
        kept, mask = self._call_keeps(ctx, shape, turned, value_dim, **facts)
        size = {"q": ctx.n_heads * ctx.head_dim, "k": ctx.n_kv_heads * ctx.head_dim}
        size["v"] = ctx.n_kv_heads * value_dim
        apart = "qk" if turned or normed else ""  # separate tensors
        read = set("qk" if normed else "") | (set(kept.given) - set(apart))
        values = [name for name in apart if name in kept.given]
        values += [name for tensor in self._tensors() if read & set(tensor) for name in tensor]
        values += "qk" if self.qk_norm is not None and turned and self.qk_norm.after_position else ""
        values += "qkv" if self.clip is not None else ""
        own = kept.own + shape.keeps(sum(size[name] for name in values))
        z = ctx.n_heads * value_dim if "z" in kept.given else 0
        if self.gain_control:  # a second call, with separate queries; the output reads the difference
            own += kept.own + shape.keeps(size["q"] + 2 * z)
        if self.gated:  # z and the opened gate, whose product the output reads
            own += shape.keeps(2 * ctx.n_heads * value_dim)
        elif turned and not self.gain_control:  # z is then laid out head by head, as q, and the output reads a copy
            own += shape.keeps(z)
        return Cost(kept=own) + mask

    def at_once(self, ctx: BuildContext, shape: Shape) -> bool:
        varied = (self.qk_norm, self.softcap, self.shares, self.clip, self.gain_control or None, self.gated or None)
        other = self.module() is not Attention or self.projection.tensors != ("qkv",) or self.sinks or self.dropout
        moved = self.position is not None and (self.position.biases or not self.position.pairs)
        if other or moved or any(one is not None for one in varied):
            return False
        facts = CallFacts.of_loops(shape.b, shape.s, ctx.head_dim, self.seen(ctx))
        return fused_products.counts(ctx, shape) and self.kernel.build(ctx).in_loops(facts)

    def _tensors(self) -> tuple[str, ...]:
        """Returns the names of q, k and v grouped by the tensor that holds them, such as "qkv" for one tensor; clipped
        ones are separate."""
        return ("q", "k", "v") if self.clip is not None else self.projection.tensors

    def _state(self, ctx: BuildContext, shape: Shape) -> Cost:
        return self._state_cost(ctx, shape, *self._projection(ctx).kept_shapes)
