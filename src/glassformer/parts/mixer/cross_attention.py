from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext, Value
from glassformer.parts.core.cost import Cost, Number, Shape
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.owner import Owner, Seam
from glassformer.parts.core.shard import Shard
from glassformer.parts.core.site import Site
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import AttentionCall, AutoConfig, HeadLayout, Kernel, KernelConfig
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.mixer.attend import SoftmaxAttention, SoftmaxAttentionConfig, attention_cost, kept_of_call
from glassformer.parts.mixer.kv import Cells, vector_bytes
from glassformer.parts.projection import CrossQKV, CrossQKVConfig, MakeCrossProjection, MemoryProjectionConfig
from glassformer.parts.reparam import MakeReparam
from glassformer.parts.state import State
from glassformer.parts.visibility import Bidirectional, ChunksOfMemory, OfMemory, Visibility

IDS = torch.int64
"""Dtype of the document ids in a state."""


class MemoryState(State):
    """Decode state of cross-attention: keys and values (b, g, slots, h) of another sequence (the memory), computed once
    and read at every step.

    `reserve` makes room. `documents` (b, slots) holds the ids of the memory's tokens, 0 for empty slots."""

    kind = "source"

    def __init__(self, batch: int, k: tuple[int, int], v: tuple[int, int], dtype: torch.dtype, device: Any = None):
        self.batch, self.shapes, self.dtype, self.device = batch, (k, v), dtype, device
        self.reserve(0)

    def reserve(self, memory_len: int) -> None:
        self.slots, self.length, self.padded = memory_len, 0, False
        self.k, self.v = (Cells(self.batch, memory_len, *shape, self.dtype, self.device) for shape in self.shapes)
        self.documents = torch.zeros(self.batch, memory_len, dtype=IDS, device=self.device)

    @property
    def memory_len(self) -> int:
        return self.slots

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        named = (("k", self.k), ("v", self.v))
        cells = {f"{name}{i or ''}": tensor for name, one in named for i, tensor in enumerate(one.tensors())}
        return {**cells, "documents": self.documents}

    def over(self, tensors: Mapping[str, Tensor]) -> MemoryState:
        other = copy.copy(self)
        other.k, other.v = (
            cells.over([tensors[name] for name in names if name in tensors])
            for cells, names in ((self.k, ("k", "k1")), (self.v, ("v", "v1")))
        )
        other.documents = tensors["documents"]
        other.batch, other.slots = other.documents.shape
        return other

    def write(self, k: Tensor, v: Tensor, documents: Tensor | None) -> None:
        """Replaces the stored keys and values of the memory by k, v (b, t, g, h), and its document ids by `documents`
        (b, t), None if no token is padding. Raises RequestError if the state has too few slots."""
        t = k.shape[1]
        if t > self.slots:
            raise RequestError(
                f"the state has room for a memory of {self.slots} tokens, and {t} were given; make it with "
                f"init_state(..., memory_len={t})",
                code="range", field="memory_len", value=self.slots, expected=f"at least {t}",
            )  # fmt: skip
        self.k[slice(0, t)], self.v[slice(0, t)] = k, v
        self.documents.zero_()
        self.documents[:, :t] = 1 if documents is None else documents
        self.length, self.padded = t, documents is not None

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns (k, v, ids): the stored keys and values (b, t, g, h) in `dtype`, and the document ids of the memory's
        tokens (b, t), None if no token is padding."""
        documents = self.documents[:, : self.length] if self.padded else None
        return self.k.upto(self.length, dtype), self.v.upto(self.length, dtype), documents

    def put(self, row: int, other: State, length: int) -> None:
        """Copies the only row of `other`, another `MemoryState`, to row `row`; the row is padded if its memory is
        shorter. Raises ValueError if it is too long."""
        assert isinstance(other, MemoryState)
        if other.length > self.slots:
            raise ValueError(f"a memory of {other.length} tokens does not fit into {self.slots} slots")
        given, t = other.tensors(), other.length
        for name, mine in self.tensors().items():
            axis = 0 if name == "documents" else 1
            mine[row].narrow(axis, 0, t).copy_(given[name][0].narrow(axis, 0, t))  # source and target may be one tensor
            mine[row].narrow(axis, t, self.slots - t).zero_()
        self.length, self.padded = max(self.length, t), True

    def clear(self, row: int, length: int) -> None:
        super().clear(row, length)
        self.padded = True

    def truncate(self, length: int) -> None:
        """Empties the state for length 0; keeps it otherwise, because the memory does not grow with the sequence."""
        if length == 0:
            self.length = 0


class CrossAttention(SoftmaxAttention):
    """z = softmax(q k^T / sqrt(h)) v per head, q from x, k and v from another sequence. Vaswani et al. 2017,
    1706.03762, 3.2.3.

        x (b,s,d) -> q (b,s,n,h)  ─┐
                                   ├─ kernel -> z (b,s,n,h) -> out (b,s,d)
        memory (b,t,m) -> k, v (b,t,g,h) -> state? ─┘

    The memory is that of the pass; a state keeps its k and v, so that later calls need no memory. Its visibility is
    `OfMemory`, and with `chunks` `ChunksOfMemory`: RETRO's chunked cross-attention, whose memory grows by the retrieved
    neighbours of each chunk of m tokens. z is zero for a query without visible keys. Sites: q, k, v, scores and pattern
    (b,n,s,t), z, out.
    """

    enter_memory: Seam | None = None
    """Function applied to the memory first, if tensor-parallel ranks share the mixer (as `enter` is applied to x); None
    for one rank."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        scale: float | None = None,
        projection: MakeCrossProjection = CrossQKV,
        dropout: float = 0.0,
        kernel: Kernel | None = None,
        reparam: MakeReparam | None = None,
        chunks: tuple[int, int] | None = None,
    ):
        """`chunks`: (number of tokens in a chunk, number of memory tokens for each chunk), for RETRO's chunked memory;
        None for a memory that every token attends to."""
        heads = Heads.of(d_model, n_heads, n_kv_heads, head_dim)
        super().__init__(heads, None, Bidirectional(), scale, dropout, kernel)
        self.projection = projection(heads)
        for name, module in self.projection.maps(d_model, bias, reparam).items():
            self.add_module(name, module)
        width, out_bias = n_heads * self.projection.value_dim, bias if out_bias is None else out_bias
        self.output = Linear(width, d_model, out_bias, "output", reparam, Shard("row", n_heads))
        self.k, self.v = Site("btgh"), Site("btgh")
        self.chunks = chunks
        self.separates_documents = chunks is None

    def divide(self, owner: Owner) -> None:
        self.divide_heads(owner)
        self.projection = self.projection.of_owner(owner)
        self.enter_memory = owner.enter_memory

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: MemoryState | None = None
    ) -> Float[Tensor, "b s d"]:
        pass_ = pass_ or Pass.of(x)
        x = x if self.enter is None else self.enter(x)
        q = self.q(self.projection.queries(self, x))
        k, v, documents = self.memory(x, pass_, state)
        call = self.call_of(q, self.k(k), self.v(v), documents, pass_)
        if self.chunks is None or pass_.start or pass_.rows is not None or self.scores.watched or self.pattern.watched:
            return self.put_out(self.attend(call))
        return self.put_out(chunk_by_chunk(call, *self.chunks, documents, self.kernel))

    def memory(self, x: Tensor, pass_: Pass, state: MemoryState | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns (k, v, ids): keys and values (b, t, g, h) of the memory and the document ids of its tokens (b, t),
        None without padding; computed from the memory of the pass, or read from the state."""
        if pass_.memory is None and state is not None and state.length:
            k, v, documents = state.read(x.dtype)
            return *self.projection.expand(self, k, v), documents
        memory = pass_.need_memory()
        seen = memory.x if self.enter_memory is None else self.enter_memory(memory.x)
        k, v = self.projection.keys_values(self, seen)
        if state is not None:
            state.write(k, v, memory.documents)
        return *self.projection.expand(self, k, v), memory.documents

    def call_of(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, pass_: Pass) -> AttentionCall:
        """Returns the kernel call of queries q (b, s, n, h) with keys and values k, v (b, t, g, h) of the memory, whose
        tokens have the document ids `documents` (b, t)."""
        visibility, index = self.visibility, None
        if self.chunks is not None:
            check_chunks(*self.chunks, pass_.end, k.shape[1])
            visibility = ChunksOfMemory(*self.chunks, documents)
        elif documents is not None:
            visibility = OfMemory(pass_.documents, documents)
        if visibility is not self.visibility:
            keys = pass_.once("memory tokens", lambda: torch.arange(k.shape[1], device=k.device))
            index = pass_.index(keys)
        dropout = self.dropout if self.training else 0.0
        return AttentionCall(q, k, v, visibility, None, self.scale, dropout, index, pass_.once)

    @property
    def causal(self) -> bool:
        """Always True: an output depends on the token at its position and the other sequence, not on later tokens."""
        return True

    @property
    def reach(self) -> int:
        return 1

    def matrices(self) -> dict[str, Matrix]:
        return {**self.projection.matrices(self), "out": Matrix.of(self.output)}

    def init_state(
        self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0
    ) -> MemoryState:
        """Returns a decode state without room for a memory; `MemoryState.reserve` makes room."""
        return MemoryState(batch, *self.projection.kept_shapes, dtype, device)


def chunk_by_chunk(call: AttentionCall, m: int, w: int, documents: Tensor | None, kernel: Kernel) -> Tensor:
    """Returns z (b, s, n, hv) of a call under `ChunksOfMemory` that starts with the first token. Chunks of `m` tokens,
    each with the `w` memory tokens that it attends to, become separate rows, so that scores are computed only for
    visible keys.

        queries m-1 .. 2m-2 and keys 0 .. w-1, queries 2m-1 .. 3m-2 and keys w .. 2w-1, ...
    """
    b, s = call.q.shape[:2]
    if not (count := s // m):
        return call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1])
    rows = F.pad(call.q[:, m - 1 :], (0, 0, 0, 0, 0, count * m - (s - m + 1)))
    q, k, v = (x.reshape(b * count, -1, *x.shape[2:]) for x in (rows, call.k[:, : count * w], call.v[:, : count * w]))
    seen = Bidirectional() if documents is None else OfMemory(None, documents[:, : count * w].reshape(b * count, w))
    z = kernel(AttentionCall(q, k, v, seen, None, call.scale, call.dropout, None, call.once))
    return F.pad(z.reshape(b, count * m, *z.shape[2:])[:, : s - m + 1], (0, 0, 0, 0, m - 1, 0))


def check_chunks(m: int, w: int, end: int, memory_len: int) -> None:
    """Raises RequestError if a memory of `memory_len` tokens is too short: each chunk of m tokens that ends before
    token `end` needs w memory tokens."""
    if memory_len < (end // m) * w:
        raise RequestError(
            f"{end} tokens have {end // m} whole chunks of {m}; the memory must have {w} tokens for each, "
            f"{end // m * w:,} in all, and it has {memory_len:,}; give what was retrieved for every chunk",
            code="range", field="memory", value=memory_len, expected=f"at least {end // m * w} tokens",
        )  # fmt: skip


class ChunksConfig(Value):
    """Config of RETRO's chunks: the memory has `width` tokens for each `chunk` tokens of the sequence, such as two
    retrieved neighbours of 128 tokens for 64 tokens."""

    chunk: int = Field(64, gt=0, le=1 << 20)
    width: int = Field(256, gt=0, le=1 << 20)

    def memory_len(self, t: int) -> int:
        """Returns the number of memory tokens for a sequence of t tokens."""
        return t // self.chunk * self.width


class CrossAttentionConfig(SoftmaxAttentionConfig, kind="cross_attention"):
    reads_memory = True

    n_heads: int = Field(gt=0, le=1 << 16)
    n_kv_heads: int | None = Field(None, gt=0, le=1 << 16)
    """Number of KV heads; None for n_heads."""
    head_dim: int | None = Field(None, gt=0, le=1 << 20)
    """Elements per head; None for d_model / n_heads."""
    bias: bool = False
    out_bias: bool | None = None
    """True if the output layer W_O has a bias; None for the value of `bias`."""
    scale: float | None = Field(None, gt=0)
    """Factor on the scores q k^T; None for 1 / sqrt(head_dim), or, under muP, sqrt(base head_dim) / head_dim."""
    projection: MemoryProjectionConfig = CrossQKVConfig()
    dropout: float = Field(0.0, ge=0, lt=1)
    kernel: KernelConfig = AutoConfig()
    chunks: ChunksConfig | None = None
    """Chunks of a retrieved memory (RETRO); None if every query attends to the whole memory."""

    def _projection(self, ctx: BuildContext) -> CrossQKV:
        return self.projection.build(self._within(ctx))(self.heads(ctx))

    def seen(self, ctx: BuildContext) -> Visibility:
        return Bidirectional()

    def causal(self, ctx: BuildContext) -> bool:
        return True

    def reach(self, ctx: BuildContext) -> int:
        return 1

    def keys_seen(self, ctx: BuildContext, t: int) -> float:
        """Returns the mean number of keys that a query attends to: all of a memory that is as long as the sequence, t
        tokens, or, with `chunks`, the memory tokens of one chunk."""
        return float(t) if self.chunks is None else ChunksOfMemory(self.chunks.chunk, self.chunks.width).keys_seen(t)

    def build(self, ctx: BuildContext) -> CrossAttention:
        n, g, h = self.heads(ctx)
        inner = self._within(ctx)
        return CrossAttention(
            ctx.d_model, n, g, h, self.bias, self.out_bias, self._scale(ctx), self.projection.build(inner),
            self.dropout, self.kernel.build(inner), ctx.make_reparam,
            None if self.chunks is None else (self.chunks.chunk, self.chunks.width),
        )  # fmt: skip

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the mixer with a memory of t tokens, whose keys and values are projected again for as
        many tokens as the pass has. With `chunks`, the memory belongs to the whole chunks of the sequence."""
        inner, projection = self._within(ctx), self._projection(ctx)
        width, held = projection.value_dim, self._memory_len(shape.t)
        output = linear_cost(ctx, shape.reading(shape.products), self.n_heads * width, ctx.d_model, bias=self._out_bias)
        total = self.projection.costs(inner, shape) + output + attention_cost(inner, shape, width, self._keys(shape))
        if more := self._memory_len(shape.s) - shape.s:  # the projection counts a memory as long as the sequence
            made = sum(n * width for n, width in projection.kept_shapes)
            total += Cost(flops=shape.passes * 2 * shape.b * more * (projection.memory_width or ctx.d_model) * made)
            total += Cost.once("more memory", Cost(kept=shape.keeps_once(shape.b * more * ctx.d_model, shape.inputs)))
        token = sum(n * vector_bytes(width, shape.state) for n, width in projection.kept_shapes) + IDS.itemsize
        return total + Cost(kept=self._kept(inner, shape, width)) + Cost.state(shape, held * token, held * token)

    def _memory_len(self, t: int) -> int:
        return t if self.chunks is None else self.chunks.memory_len(t)

    def _keys(self, shape: Shape) -> Number:
        """Returns the number of keys per query whose scores are computed."""
        if self.chunks is None or shape.s < shape.t:
            return self._memory_len(shape.t)
        return self._memory_len(shape.t) * self.chunks.chunk / shape.t

    def _kept(self, ctx: BuildContext, shape: Shape, width: int) -> int:
        """Returns the bytes kept for the backward pass: q, k and v in the form that the kernel reads, and the tensors
        that the kernel keeps."""
        if shape.phase != "train":
            return 0
        n, g, h = ctx.n_heads, ctx.n_kv_heads, ctx.head_dim
        rows = shape
        if self.chunks is not None and (count := shape.s // self.chunks.chunk):  # a separate row for each chunk
            m, w = self.chunks.chunk, self.chunks.width
            rows = replace(shape, b=shape.b * count, s=min(m, w), t=w)
        kept = kept_of_call(self.kernel.build(ctx), Bidirectional(), HeadLayout(n, g), h, rows, self.dropout)
        made = g * (h + width) * bool({"k", "v"} & set(kept.given)) * shape.b * self._memory_len(shape.s)
        return kept.own + shape.keeps(n * h * ("q" in kept.given)) + shape.keeps_once(made)
