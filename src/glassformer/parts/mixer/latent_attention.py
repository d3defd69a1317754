from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

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
from glassformer.parts.core.site import Site
from glassformer.parts.core.words import Word, whole
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import (
    AutoConfig,
    Kernel,
    KernelConfig,
)
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.mixer.attend import SoftmaxAttention, SoftmaxAttentionConfig, attention_cost, keys_met
from glassformer.parts.mixer.base import MixerChange
from glassformer.parts.mixer.kv import KVState, state_of
from glassformer.parts.norm import NormConfig, RMSNorm, RMSNormConfig
from glassformer.parts.position import AttentionPosition, AttentionPositionConfig
from glassformer.parts.reparam import MakeReparam
from glassformer.parts.visibility import CausalConfig, Visibility, VisibilityConfig

Form = Literal["auto", "expanded", "absorbed"]


class LatentShape(NamedTuple):
    """Sizes of the heads and latents of a `LatentAttention`."""

    n: int
    """Number of heads."""
    content: int
    """dn: number of elements of a head's query and key that have no position; the key's are made from the latent."""
    rope: int
    """dr: number of elements of a head's query and key that have a rotary position; the key's are shared by all
    heads."""
    value: int
    """dv: number of elements of a head's value."""
    kv_rank: int
    """r: number of elements of the latent that makes keys and values."""
    q_rank: int
    """Number of elements of the latent that makes queries; 0 for queries made from x itself."""

    @property
    def query(self) -> int:
        return self.content + self.rope

    def absorbs(self, s: int) -> bool:
        """Returns True if attention of s queries to many keys needs fewer operations in the absorbed form: n (2 r + dr)
        for each pair of a query and a key, against n (dn + dr + dv) per pair plus n r (dn + dv) per key, to expand its
        latent."""
        each = self.content + self.value
        return s * (2 * self.kv_rank - each) <= self.kv_rank * each


class LatentAttention(SoftmaxAttention):
    """Attention whose keys and values are projections of one latent per token, the only tensor that is cached.

        c = norm(x W_DKV)   k_r = rope(x W_KR)      c (b,s,r), k_r (b,s,dr), shared by the heads
        q = [q_c, rope(q_r)] = x W_Q, or norm(x W_DQ) W_UQ                    q (b,s,n,dn+dr)
        k = [c W_UK, k_r]   v = c W_UV               k (b,t,n,dn+dr), v (b,t,n,dv)
        z = softmax(q k^T / sqrt(dn + dr)) v         out = z W_O

    MLA: DeepSeek-V2, 2405.04434, section 2.1. This is its `expanded` form. The `absorbed` form is equal and never makes
    k and v: it projects the few queries instead of the many keys,

        q_c (c W_UK)^T = (q_c W_UK^T) c^T            p (c W_UV) = (p c) W_UV

    so that all heads attend to one key [c, k_r] and value c, r + dr elements per token. Decoding uses it; many queries,
    as in training, are cheaper expanded. The form `auto` chooses by the number of operations.

    Sites: q, k, v, latent (b,s,r), scores and pattern (b,n,s,t), z, out. With a decode state k and v are computed only
    for observers, and only the latent is editable.
    """

    reads_gathered = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        kv_rank: int,
        head_dim: int,
        rope_dim: int,
        value_dim: int | None = None,
        q_rank: int = 0,
        bias: bool = False,
        q_norm: nn.Module | None = None,
        kv_norm: nn.Module | None = None,
        position: AttentionPosition | None = None,
        visibility: Visibility | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        kernel: Kernel | None = None,
        form: Form = "auto",
        reparam: MakeReparam | None = None,
    ):
        n, dn, dr, dv = n_heads, head_dim, rope_dim, value_dim or head_dim
        super().__init__(Heads(n, n, dn + dr), position, visibility, scale, dropout, kernel)
        self.shape, self.form = LatentShape(n, dn, dr, dv, kv_rank, q_rank), form
        by_head = Shard("column", n)
        if q_rank:
            self.q_down = Linear(d_model, q_rank, bias, reparam=reparam)
            self.q_norm = q_norm or RMSNorm(q_rank, 1e-6)
        self.q_up = Linear(q_rank or d_model, n * (dn + dr), role="score", reparam=reparam, shard=by_head)
        self.kv_down = Linear(d_model, (kv_rank, dr), bias, ("hidden", "score"), reparam)
        self.kv_norm = kv_norm or RMSNorm(kv_rank, 1e-6)
        self.kv_up = Linear(kv_rank, (n * dn, n * dv), False, ("score", "hidden"), reparam, (by_head, by_head))
        self.output = Linear(n * dv, d_model, bias, "output", reparam, Shard("row", n))
        self.latent = Site("bsr")

    def divide(self, owner: Owner) -> None:
        self.divide_heads(owner)
        self.shape = self.shape._replace(n=self.n_heads)

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: KVState | None = None
    ) -> Float[Tensor, "b s d"]:
        pass_ = pass_ or Pass.of(x)
        x = x if self.enter is None else self.enter(x)
        few = state is not None and pass_.start > 0 and self.shape.absorbs(x.shape[1])
        q, c, turned = self.project(x, pass_)
        k_idx = None
        if state is not None:
            self._show(c, turned)
            c, turned, k_idx = state.append(c[:, :, None], turned, pass_)
            c = c[:, :, 0]
        absorbed = few if self.form == "auto" else self.form == "absorbed"
        made = self.absorbed if absorbed else self.expanded
        z = made(q, c, turned, k_idx, pass_, apart=state is None)
        return self.put_out(z)

    def project(self, x: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (queries (b,s,n,dn+dr), latent (b,s,r), shared keys (b,s,1,dr)) of x (b,s,d)."""
        down = self.q_norm(self.q_down(x)) if self.shape.q_rank else x
        q = self.q_up(down).unflatten(-1, (self.n_heads, -1))
        c, shared = self.kv_down.split(self.kv_down(x))
        shared = shared[:, :, None]
        if self.position is not None:
            q_c, q_r = q.split([self.shape.content, self.shape.rope], -1)
            q_r, shared = self.position(q_r, shared, pass_)
            q = torch.cat((q_c, q_r), -1)
        return self.q(q), self.latent(self.kv_norm(c)), shared

    def expand(self, c: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        """Returns k (b,t,n,dn+dr) and v (b,t,n,dv), computed from the latent `c` (b,t,r) and the shared keys `turned`
        (b,t,1,dr)."""
        k, v = (y.unflatten(-1, (self.n_heads, -1)) for y in self.kv_up.split(self.kv_up(c)))
        return torch.cat((k, turned.expand(-1, -1, self.n_heads, -1)), -1), v

    def expanded(
        self, q: Tensor, c: Tensor, turned: Tensor, k_idx: Tensor | None, pass_: Pass, apart: bool = False
    ) -> Tensor:
        """Returns z (b,s,n,dv) in the expanded form, which makes keys and values of the latent `c`. `turned`
        (b,t,1,dr): the shared keys. `apart`: True to pass k and v through their sites."""
        k, v = self.expand(c, turned)
        if apart:
            k, v = self.k(k), self.v(v)
        return self.attend(self.call(q, k, v, k_idx, pass_))

    def absorbed(
        self, q: Tensor, c: Tensor, turned: Tensor, k_idx: Tensor | None, pass_: Pass, apart: bool = False
    ) -> Tensor:
        """Returns z (b,s,n,dv) in the absorbed form, in which all heads attend to the latent `c` itself. `apart`: True
        to compute k and v separately for observers."""
        if apart:
            self._show(c, turned)
        size = self.shape
        w_k, w_v = (w.unflatten(0, (size.n, -1)) for w in self.kv_up.applied().to(c.dtype).split(self.kv_up.outs))
        q_c, q_r = q.split([size.content, size.rope], -1)
        q = torch.cat((torch.einsum("bsnh,nhr->bsnr", q_c, w_k), q_r), -1)
        c = c[:, :, None]
        seen = self.attend(self.call(q, torch.cat((c, turned), -1), c, k_idx, pass_))
        return torch.einsum("bsnr,nhr->bsnh", seen, w_v)

    def _show(self, c: Tensor, turned: Tensor) -> None:
        """Computes k and v of the new tokens for observers of their sites, if any, from the latent `c` and the shared
        keys `turned`. Raises RequestError if one of these sites is edited."""
        if self.k.edited or self.v.edited:
            raise RequestError(
                "mixer.k and mixer.v are not computed when only the latent is stored; edit mixer.latent",
                code="unsupported", field="mixer.k" if self.k.edited else "mixer.v",
            )  # fmt: skip
        if self.k.watched or self.v.watched:
            k, v = self.expand(c, turned)
            self.k(k), self.v(v)

    def matrices(self) -> dict[str, Matrix]:
        """Returns {name: weight matrix} of this mixer; a name is that of the site with the matrix's result. `rope`
        makes the shared keys; `q_latent`, the latent of queries, exists if q_rank > 0."""
        n, down = self.n_heads, {"latent": Matrix.of(self.kv_down), "rope": Matrix.of(self.kv_down, 1)}
        if self.shape.q_rank:
            down["q_latent"] = Matrix.of(self.q_down)
        up = {"q": Matrix.of(self.q_up, 0, n), "k": Matrix.of(self.kv_up, 0, n), "v": Matrix.of(self.kv_up, 1, n)}
        return {**down, **up, "out": Matrix.of(self.output)}

    def init_state(self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0) -> KVState:
        """Returns an empty decode state for the latent and the shared key of each token within reach."""
        kept = (1, self.shape.kv_rank), (1, self.shape.rope)
        state = state_of(self.visibility, kept, batch, max_len, dtype, device, rewind)
        state.kind = "latent"
        return state


class LatentAttentionConfig(
    SoftmaxAttentionConfig, kind="latent_attention", words=Word("mla", whole("kv_rank"), "64", optional=True)
):
    """Multi-head latent attention: k = [c W_UK, k_r], v = c W_UV of one latent c = norm(x W_DKV) per token. A decode
    state keeps r + dr elements per token. DeepSeek-V2, 2405.04434.

    Every head has separate keys and values, made of the one latent, without groups. The word `mla` takes the number of
    heads of the mixer that it replaces, without its KV groups; `+gqa:2` together with it is refused.

    Default sizes are the paper's shares of a head. It loses for short contexts: a token passes more layers than in
    grouped attention of equal state, and a wide latent makes each decoding step n (2 r + dr) operations per key instead
    of 2 n h.
    """

    n_heads: int = Field(gt=0, le=1 << 16)
    kv_rank: int | None = Field(None, gt=0, le=1 << 20)
    """Number r of elements of the latent that makes keys and values; None for 4 head_dim."""
    q_rank: int | None = Field(0, ge=0, le=1 << 20)
    """Number of elements of the latent that makes queries; 0 for queries made from x itself; None for 12 head_dim."""
    head_dim: int | None = Field(None, gt=0, le=1 << 20)
    """Number dn of elements of a head's query and key without a position; None for d_model / n_heads."""
    rope_dim: int | None = Field(None, gt=0, le=1 << 20)
    """Number dr of elements of a head's query and of the shared key that have a rotary position; None for half of
    head_dim."""
    value_dim: int | None = Field(None, gt=0, le=1 << 20)
    """Number dv of elements of a head's value; None for head_dim."""
    norm: NormConfig = RMSNormConfig(eps=1e-6)
    """Config of the norm of the latents."""
    bias: bool = False
    """True if the layers that make the latents, and the output layer, have biases."""
    position: AttentionPositionConfig | None = None
    visibility: VisibilityConfig = CausalConfig()
    scale: float | None = Field(None, gt=0)
    """Factor on the scores q k^T; None for 1 / sqrt(head_dim + rope_dim)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    kernel: KernelConfig = AutoConfig()
    form: Form = "auto"
    """Form of the computation, equal in its result: "expanded" makes keys and values of all tokens, "absorbed" attends
    to the latents; "auto" chooses the one with fewer operations."""

    @classmethod
    def replacing(cls, old: Any, **fields: Any) -> Any:
        """Returns a config of this kind to replace `old`, with the number of heads of `old` and the given `fields`.
        Raises RequestError if `old` has no heads."""
        if not hasattr(old, "n_heads"):
            raise RequestError(
                f"mla takes the heads of the mixer that it replaces, and {old.kind} has no heads; start from attention",
                code="conflict", field="mixer.kind", value=old.kind, expected="a mixer with n_heads",
            )  # fmt: skip
        return super().replacing(old, **fields)

    def shape(self, ctx: BuildContext) -> LatentShape:
        h = Heads.of(ctx.d_model, self.n_heads, None, self.head_dim).head_dim
        q_rank = 12 * h if self.q_rank is None else self.q_rank
        half = max(2, h // 2 // 2 * 2)
        return LatentShape(self.n_heads, h, self.rope_dim or half, self.value_dim or h, self.kv_rank or 4 * h, q_rank)

    def heads(self, ctx: BuildContext) -> Heads:
        """Returns the numbers of the mixer's heads; head_dim h counts all elements of a query, those without and with a
        position."""
        shape = self.shape(ctx)
        return Heads(shape.n, shape.n, shape.query)

    def resized(self, n_heads: int) -> LatentAttentionConfig:
        ranks = {"kv_rank": None, "q_rank": self.q_rank and None}
        return self.replace(n_heads=n_heads, head_dim=None, rope_dim=None, value_dim=None, **ranks)

    def changed(self, change: MixerChange, new: Callable[[Any], Any]) -> Any:
        if change == "n_kv_heads":
            if new(None) not in (None, self.n_heads):
                raise RequestError(
                    f"mixer.n_kv_heads={new(None)}: latent attention shares one latent among all heads, not keys and "
                    "values among groups; change kv_rank, or use a mixer of kind attention",
                    code="conflict", field="mixer.n_kv_heads", value=new(None), expected="none",
                )  # fmt: skip
            return self
        return super().changed(change, new)

    def can_clip_logits(self) -> bool:
        raise RequestError(
            "mixer.kind=latent_attention: its heads share a key, which no head can scale for itself",
            code="unsupported", field="mixer.kind", value="latent_attention",
        )  # fmt: skip

    def _of_position(self, ctx: BuildContext) -> BuildContext:
        return self._within(ctx).within(n_kv_heads=1, head_dim=self.shape(ctx).rope)

    def build(self, ctx: BuildContext) -> LatentAttention:
        if ctx.mup is not None:
            raise RequestError(
                "mup has no rule for latents, whose width is not the model's; leave mup or mla out",
                code="conflict", field="mup", value=self.kind,
            )  # fmt: skip
        n, dn, dr, dv, r, q_rank = self.shape(ctx)
        return LatentAttention(
            ctx.d_model, n, r, dn, dr, dv, q_rank, self.bias,
            q_norm=self.norm.build(ctx.within(width=q_rank)) if q_rank else None,
            kv_norm=self.norm.build(ctx.within(width=r)),
            position=self.position.build(self._of_position(ctx)) if self.position else None,
            visibility=self.visibility.build(ctx), scale=self.scale, dropout=self.dropout,
            kernel=self.kernel.build(self._within(ctx)), form=self.form, reparam=ctx.make_reparam,
        )  # fmt: skip

    def resolved(self, ctx: BuildContext) -> Any:
        shape = self.shape(ctx)
        return super().resolved(ctx).replace(
            kv_rank=shape.kv_rank, q_rank=shape.q_rank, head_dim=shape.content, rope_dim=shape.rope,
            value_dim=shape.value, form="auto",
        )  # fmt: skip

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the mixer; a pass that continues a decode state is counted in the absorbed form if the
        module would use it."""
        (n, dn, dr, dv, r, q_rank), d = self.shape(ctx), ctx.d_model
        narrow = shape.reading(shape.products)
        maps = linear_cost(ctx, shape, d, q_rank or n * (dn + dr), (r, dr), bias=self.bias and bool(q_rank))
        if not q_rank and self.bias:
            maps += Cost.weights(r + dr)
        maps += self.norm.costs(ctx.within(width=r), narrow) + linear_cost(ctx, narrow, n * dv, d, bias=self.bias)
        if q_rank:
            maps += self.norm.costs(ctx.within(width=q_rank), narrow) + linear_cost(ctx, narrow, q_rank, n * (dn + dr))
        turn = self.position.costs(self._of_position(ctx), shape) if self.position else Cost()
        return maps + turn + self._core(ctx, shape) + self._state_cost(ctx, shape, (1, r), (1, dr))

    def _core(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of W_UK, W_UV and the attention, in the form (expanded or absorbed) that the module uses."""
        size, goes_on = self.shape(ctx), shape.phase != "train" and shape.s < shape.t
        n, dn, dr, dv, r, _ = size
        absorbed = self.form == "absorbed" or (self.form == "auto" and goes_on and size.absorbs(shape.s))
        keys = keys_met(self.seen(ctx), shape)
        if absorbed:
            whole = ctx.within(n_heads=n, n_kv_heads=1, head_dim=r + dr)
            weights = r * n * (dn + dv)
            own = Cost.weights(
                weights, flops=shape.passes * 2 * shape.tokens * weights, moved_bytes=shape.reads(weights)
            )
            kept = self._kernel_keeps(whole, shape, r) + Cost(
                kept=shape.keeps(n * (dn + dr) + r + (n + 1) * (r + dr) + n * r)
            )
            return own + attention_cost(whole, shape, r, keys) + kept
        read = shape.reading(shape.products)
        if goes_on:  # every key is expanded again
            read = Shape(**{**vars(read), "s": shape.t})
        core = attention_cost(self._within(ctx), shape, dv, keys)
        return linear_cost(ctx, read, r, (n * dn, n * dv)) + core + self._kept(ctx, shape)

    def _kept(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the tensors kept for the backward pass: the shared key and the latent before its norm, q
        and k in the form that the kernel reads, k and v as W_UK and W_UV make them, and the tensors that the kernel
        keeps."""
        n, dn, dr, dv, _, _ = self.shape(ctx)
        given = self._call_keeps(self._within(ctx), shape, value_dim=dv)[0].given
        values = dr + n * (dn + dr) * sum(name in given for name in "qk") + n * (dn + dv) * ("v" in given)
        return self._kernel_keeps(self._within(ctx), shape, dv) + Cost(kept=shape.keeps(values))

    def _kernel_keeps(self, ctx: BuildContext, shape: Shape, value_dim: int) -> Cost:
        """Returns the cost of the tensors that the kernel keeps, and of the mask, which other layers share."""
        if shape.phase != "train":
            return Cost()
        kept, mask = self._call_keeps(ctx, shape, value_dim=value_dim)
        return Cost(kept=kept.own) + mask
