from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.init import Init
from glassformer.parts.core.shard import Shard
from glassformer.parts.core.words import Word, whole
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import AttentionCall, AutoConfig, CallFacts, HeadLayout, Kernel, KernelConfig
from glassformer.parts.kernel.base import ScoreBias
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.mixer.attend import (
    SoftmaxAttention,
    SoftmaxAttentionConfig,
    attention_cost,
    kept_of_call,
    keys_met,
)
from glassformer.parts.mixer.kv import KVState, WindowState
from glassformer.parts.precision import wide
from glassformer.parts.reparam import MakeReparam
from glassformer.parts.visibility import SlidingWindow, Visibility
from glassformer.parts.visibility.base import SameDocument


def waves(distances: Float[Tensor, " r"], width: int) -> Float[Tensor, "r d"]:
    """Returns the sinusoidal encoding R (r, d) of r distances: sines, then cosines, of distance times 10000^(-2i/d),
    for d = `width`."""
    exponents = torch.arange(0, width, 2, device=distances.device, dtype=distances.dtype) / width
    angle = distances[:, None] * 10_000.0**-exponents
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class _ByDistance(ScoreBias):
    """Bias table[b, n, i, r] of query i and the key r tokens before it, for a table (b, n, s, r).

    first    index of the first query; as a tensor (1,) or (b, 1)
    given    positions (b, t) of the tokens, if they have gaps
    """

    def __init__(self, table: Tensor, first: int | Tensor, given: Tensor | None):
        def add(score: Tensor, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
            row = q_idx - (first[b, 0] if isinstance(first, Tensor) and first.dim() == 2 else first)
            if given is not None:
                last = given.shape[1] - 1
                q_idx, k_idx = given[b, q_idx.clamp(max=last)], given[b, k_idx.clamp(max=last)]
            return score + table[b, n, row, (q_idx - k_idx).clamp(0, table.shape[-1] - 1)]

        super().__init__(add, True, "xl_memory", (table,))
        self.table, self.first, self.given = table, first, given

    def by_block(self, sizes: list[int]) -> list[ScoreBias]:
        tables, before = self.table.split(sizes, 2), accumulate(sizes, initial=0)
        return [_ByDistance(table, self.first + at, self.given) for table, at in zip(tables, before, strict=False)]


class XLMemory(SoftmaxAttention):
    """Attention of a segment to itself and to the hidden states of the m tokens before it, by relative positions:
    Transformer-XL. Dai et al. 2019, 1901.02860.

        h = [sg(memory), x]        q = x W_Q        k, v = h W_K, h W_V
        score_ij = ((q_i + u) k_j + (q_i + w) W_R R_(i-j)) / sqrt(h)        0 <= i - j <= m

    x (b,s,d) -> q (b,s,n,h), k, v (b,t,n,h); u, w (n,h) are learned, R_(i-j) (d,) are sines and cosines of distances.
    Every token attends to itself and the m before it (`same_length` in the paper's code). The memory is the decode
    state: it keeps the last tokens' x, d elements each, which are projected to keys and values again in every call. A
    caller that trains on one segment after another with one state trains as the paper does: no gradient reaches the
    memory, but W_K and W_V get the memory's gradient. Without a state all s tokens are one segment.

    Sites: q, k, v, scores, pattern (b,n,s,t), z, out.

    It loses for many steps with a long memory: each projects the keys of the whole memory. Scores cost twice those of
    attention.
    """

    visibility: SlidingWindow

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        memory: int = 256,
        bias: bool = False,
        kernel: Kernel | None = None,
        reparam: MakeReparam | None = None,
    ):
        heads = Heads.of(d_model, n_heads, None, head_dim)
        super().__init__(heads, None, SlidingWindow(memory + 1), None, 0.0, kernel, CallFacts(learned=True))
        if d_model % 2:
            raise RequestError(
                f"xl_memory has a sine and a cosine for each two of d_model={d_model} values; use an even width",
                code="range", field="d_model", value=d_model, expected="an even number",
            )  # fmt: skip
        n, h, self.d_model = self.n_heads, self.head_dim, d_model
        column = Shard("column", n)
        self.q_proj = Linear(d_model, n * h, bias, "score", reparam, column)
        self.kv_proj = Linear(d_model, (n * h, n * h), bias, ("score", "hidden"), reparam, column)
        self.distance = Linear(d_model, n * h, False, "score", reparam, column)
        self.content_bias, self.distance_bias = nn.Parameter(torch.empty(n, h)), nn.Parameter(torch.empty(n, h))
        self.output = Linear(n * h, d_model, bias, "output", reparam, Shard("row", n))
        self.init_weights(Init())

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: KVState | None = None
    ) -> Float[Tensor, "b s d"]:
        pass_ = pass_ or Pass.of(x)
        h, k_idx = x, None
        if state is not None:  # the state keeps a vector as two halves, as it would keep keys and values
            one, two = x[:, :, None].split(_halves(self.d_model), -1)
            one, two, k_idx = state.append(one, two, pass_)
            h = torch.cat([one, two], dim=-1).squeeze(2)
        k, v = (part.unflatten(-1, (self.n_heads, -1)) for part in self.kv_proj.split(self.kv_proj(h)))
        q, k, v = self.q(self.q_proj(x).unflatten(-1, (self.n_heads, -1))), self.k(k), self.v(v)
        # without k_idx the queries are the last of the keys
        first: int | Tensor = h.shape[1] - x.shape[1] if k_idx is None else pass_.slots[..., :1]
        bias = self.by_distance(q + self.distance_bias.to(q.dtype), first, pass_)
        seen = self.visibility if pass_.documents is None else SameDocument(self.visibility, pass_.documents)
        q = q + self.content_bias.to(q.dtype)
        return self.put_out(self.attend(AttentionCall(q, k, v, seen, bias, self.scale, 0.0, pass_.index(k_idx))))

    def by_distance(self, q: Tensor, first: int | Tensor, pass_: Pass) -> ScoreBias:
        """Returns the bias that adds, for query i and a key r tokens before, the score of their distance, from a table
        (b, n, s, r) of q W_R R_r. `first`: the index of the first query; as a tensor (1,) or (b, 1)."""
        given = pass_.given  # positions with gaps are further apart than tokens
        reach = min(pass_.end if given is None else int(given.max()) + 1, self.visibility.window)
        wave = waves(torch.arange(reach, device=q.device, dtype=wide(q).dtype), self.d_model).to(q.dtype)
        table = torch.einsum("bsnh,rnh->bnsr", q, self.distance(wave).unflatten(-1, (self.n_heads, -1)))
        return _ByDistance(table * self.scale, first, given)

    def matrices(self) -> dict[str, Matrix]:
        """Returns {name: weight matrix} of this mixer; a name is that of the site with the matrix's result. `distance`
        (W_R) makes the keys of distances."""
        n = self.n_heads
        maps = {"k": Matrix.of(self.kv_proj, 0, n), "v": Matrix.of(self.kv_proj, 1, n)}
        distance = Matrix.of(self.distance, 0, n)
        return {"q": Matrix.of(self.q_proj, 0, n), **maps, "distance": distance, "out": Matrix.of(self.output)}

    def init_state(self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0) -> KVState:
        first, second = ((1, width) for width in _halves(self.d_model))
        if (window := self.visibility.window) + rewind < max_len:
            return WindowState(batch, window, first, second, dtype, device, rewind)
        return KVState(batch, max_len, first, second, dtype, device)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        init.fill(self.content_bias, "score")
        init.fill(self.distance_bias, "score")


def _halves(width: int) -> list[int]:
    return [width - width // 2, width // 2]


class XLMemoryConfig(SoftmaxAttentionConfig, kind="xl_memory", words=Word("xl_memory", whole("memory"), "256")):
    """Config of Transformer-XL's attention to the m earlier tokens by relative positions, with a cache of hidden states
    (1901.02860): score_ij = ((q_i + u) k_j + (q_i + w) W_R R_(i-j)) / sqrt(h). It loses in token-by-token generation,
    because each step projects the keys of the whole memory."""

    knows_order: ClassVar[bool] = True

    n_heads: int | None = Field(None, gt=0, le=1 << 16)
    """Number of heads; None for one per 64 of the width, or the nearest number that divides it."""
    head_dim: int | None = Field(None, gt=0, le=1 << 20)
    """Elements per head; None for d_model / n_heads."""
    memory: int = Field(256, gt=0, le=1 << 24)
    """Number m of earlier tokens that each token attends to; a number larger than the context is reduced to it."""
    bias: bool = False
    kernel: KernelConfig = AutoConfig()

    def seen(self, ctx: BuildContext) -> Visibility:
        return SlidingWindow(self.memory + 1)

    def heads(self, ctx: BuildContext) -> Heads:
        return Heads.of(ctx.d_model, self.n_heads or Heads.fitting(ctx.d_model), None, self.head_dim)

    def resized(self, n_heads: int) -> XLMemoryConfig:
        return self.replace(n_heads=n_heads, head_dim=None)

    def build(self, ctx: BuildContext) -> XLMemory:
        if ctx.mup is not None:
            raise RequestError(
                "mup has no rule for the mixer xl_memory, whose scores have two sums; leave mup out",
                code="conflict", field="mup", value=self.kind,
            )  # fmt: skip
        n, _, h = self.heads(ctx)
        return XLMemory(ctx.d_model, n, h, self.memory, self.bias, self.kernel.build(ctx), ctx.make_reparam)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the mixer. Keys and values are projected from the memory too. Kept for the backward pass
        are also the queries for distances, the keys of distances, the index of each token pair in the table of their
        products, and the tensors that the kernel keeps."""
        (n, _, h), d, s, t = self.heads(ctx), ctx.d_model, shape.s, shape.t
        near = min(t, self.memory + 1)
        read = t if shape.phase == "train" else min(t, near + s - 1)
        inner, narrow = self._within(ctx), shape.reading(shape.products)
        of_memory, of_distances = replace(shape, s=read, t=max(t, read)), replace(shape, b=1, s=near, t=max(t, near))
        visibility = self.seen(ctx)
        maps = linear_cost(ctx, shape, d, n * h, bias=self.bias)
        maps += linear_cost(ctx, of_memory, d, (n * h, n * h), bias=self.bias)
        maps += linear_cost(ctx, of_distances, d, n * h)
        maps += linear_cost(ctx, narrow, n * h, d, bias=self.bias)
        table = Cost.weights(
            2 * n * h,
            flops=shape.passes * 2 * shape.tokens * n * h * near,
            kept=shape.keeps(n * h) + shape.keeps_once(near * n * h),
            moved_bytes=shape.passes * shape.tokens * n * near * shape.products.itemsize,
        )
        kernel = self.kernel.build(ctx)
        kept = kept_of_call(kernel, visibility, HeadLayout(n, n, True), h, shape, learned=True)
        looks = shape.keeps_once(kernel.pairs(visibility, s, t) + s, torch.int64)
        again = shape.keeps(d) if shape.inputs == shape.products else 0  # bytes of x, read by two layers
        if shape.products != shape.dtype:  # the layer of distances passes no gradient on: its cast is freed
            again += shape.keeps_once(d * n * h)
        state = self._state_cost(ctx, shape, *((1, width) for width in _halves(d)))
        own = Cost(kept=kept.own + looks - again if shape.phase == "train" else 0)
        return maps + table + attention_cost(inner, shape, h, keys_met(visibility, shape)) + own + state
