from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from glassformer.parts.base import BuildContext
from glassformer.parts.kernel.base import (
    AttentionCall,
    CallFacts,
    HeadLayout,
    KeptTensors,
    Kernel,
    KernelConfig,
    masked_bias,
    pattern_bytes,
)
from glassformer.parts.precision import wide
from glassformer.parts.visibility import Visibility

BLOCK = 128

Spans = list[tuple[int, int]]
"""Intervals [begin, end) of keys, at least one."""


class Tile(NamedTuple):
    """Queries `begin` .. `end`-1 against keys `first` .. `last`-1; `mask` is added to the columns from `since` on."""

    begin: int
    end: int
    first: int
    last: int
    since: int
    mask: Tensor | None


class Banded(Kernel):
    """Blocks of queries against only those keys that one of them can see.

    Under a causal mask block i reads keys 0 .. its end, half the work of the whole square; under a window of w it
    reads its own block and the w - 1 keys before, so time and memory are O(s (w + block)) for any s. For the backward
    pass it keeps the pattern of each block in the products' dtype.
    """

    name = "banded"

    def __init__(self, block: int = BLOCK):
        self.block = block

    def attend(self, call: AttentionCall) -> Tensor:
        # Masks travel outside autograd: a learned bias takes the other path, which torch differentiates.
        if call.dropout or call.learned or not call.additive or not call.sees_itself:
            return self._general(call)
        tiles = call.once(("tiles", self.block, *call.key), lambda: self.tiles(call))
        return self._general(call) if tiles is None else _Tiles.apply(call.q, call.k, call.v, call.score_scale, tiles)

    def keeps(self, facts: CallFacts, visibility: Visibility, heads: HeadLayout) -> KeptTensors:
        """The pattern of each block; keys and values that lie token by token, head by head."""
        n, g = heads.n, heads.g
        blocks = [(end - begin, spans) for begin, end, spans in self.blocks(visibility, facts.s, facts.t)]
        area = sum(rows * _width(spans) for rows, spans in blocks)
        pairs = facts.batch * n * area
        per_head = facts.batch * facts.head_dim * facts.dtype.itemsize
        tiled = facts.additive and not facts.dropout and not facts.learned
        if tiled and all(len(spans) == 1 for _, spans in blocks):
            copies = g * facts.t * (1 if heads.by_head else 2)
            return KeptTensors(pairs * facts.dtype.itemsize + copies * per_head, given="qk" if heads.by_head else "q")
        read = sum(_width(spans) for _, spans in blocks)
        copies = n * facts.s + g * (facts.t if heads.by_head else read) + g * read
        visible = area + facts.s  # bools: of a query and a key, and of a query with any key
        return KeptTensors(pattern_bytes(facts, pairs) + visible + copies * per_head)

    def blocks(self, visibility: Visibility, s: int, t: int) -> list[tuple[int, int, Spans]]:
        """(begin, end, spans): queries begin .. end-1, and the intervals of keys that one of them may see, the queries
        being the last s of t tokens."""
        ends = [(begin, min(begin + self.block, s)) for begin in range(0, s, self.block)]
        return [(begin, end, visibility.spans(t - s + begin, t - s + end, t)) for begin, end in ends]

    def tiles(self, call: AttentionCall) -> list[Tile] | None:
        """The blocks with their masks, -inf where invisible, plus the bias where there is one; None where a block's
        keys are not one interval."""
        visibility, s, t = call.visibility, call.q.shape[1], call.k.shape[1]
        b, n, q_idx, k_idx = call.at
        made = []
        for begin, end, spans in self.blocks(visibility, s, t):
            if len(spans) != 1:
                return None
            ((first, last),) = spans
            # Keys before the block are all visible to it when nothing but order decides.
            since = (t - s + begin if visibility.causal else last) if call.plain else first
            if since >= last:
                made.append(Tile(begin, end, first, last, last, None))
                continue
            at = b, n, q_idx[:, :, begin:end], k_idx[..., since:last]
            mask = masked_bias(visibility, call.bias, at).detach().to(call.q.dtype)
            made.append(Tile(begin, end, first, last, since, mask))
        return made

    def _general(self, call: AttentionCall) -> Tensor:
        """Any bias, any indices, any intervals, dropout: the same blocks, differentiated by torch."""
        q, k, v = call.q, call.k, call.v
        batch, s, n, h = q.shape
        t, g = k.shape[1], k.shape[2]
        b, heads, q_idx, k_idx = call.at
        queries = q.unflatten(2, (g, n // g)).permute(0, 2, 3, 1, 4)  # (b, g, n/g, s, h)
        keys, values = k.permute(0, 2, 3, 1), v.transpose(1, 2)  # (b, g, h, t), (b, g, t, h)
        out = []
        for begin, end, spans in self.blocks(call.visibility, s, t):
            if call.index is not None:  # keys lie in no order
                spans = [(0, t)]
            rows = queries[:, :, :, begin:end].reshape(batch, g, -1, h)
            scores = wide(rows @ _within(keys, spans, 3)).view(batch, n, end - begin, -1) * call.score_scale
            at = b, heads, q_idx[:, :, begin:end], _within(k_idx, spans, 3)
            if call.bias is not None:
                scores = call.bias(scores, *at)
            visible = call.visibility.visible(*at)
            scores = scores.masked_fill(~visible, float("-inf"))
            pattern = torch.softmax(scores, -1).masked_fill(~visible.any(-1, keepdim=True), 0.0).to(v.dtype)
            pattern = F.dropout(pattern, call.dropout).view(batch, g, -1, pattern.shape[-1])
            out.append((pattern @ _within(values, spans, 2)).view(batch, n, end - begin, v.shape[-1]))
        return torch.cat(out, dim=2).transpose(1, 2)


def _width(spans: Spans) -> int:
    return sum(end - begin for begin, end in spans)


def _within(x: Tensor, spans: Spans, dim: int) -> Tensor:
    """The intervals of x, one after another; a single one is not copied."""
    parts = [x.narrow(dim, begin, end - begin) for begin, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class _Tiles(torch.autograd.Function):
    """Attention over tiles. Every query sees itself here, so no row of a pattern is empty.

    Grouped heads become rows: the n/g query heads that share keys stand below each other in one product. Scores become
    the pattern, and its gradient theirs, in the place where they lie: the cache still holds them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, tiles: list[Tile]) -> Tensor:
        b, s, n, h = q.shape
        t, g = k.shape[1], k.shape[2]
        queries = q.transpose(1, 2)  # (b, n, s, h)
        keys, values = (x.transpose(1, 2).reshape(b * g, t, x.shape[-1]) for x in (k, v))
        width = v.shape[-1]
        z = q.new_empty(b, s, n, width)
        learns = any(ctx.needs_input_grad)
        patterns = []
        for begin, end, first, last, since, mask in tiles:
            rows = queries[:, :, begin:end].reshape(b * g, -1, h)
            scores = scaled_product(rows, keys[:, first:last].transpose(1, 2), scale)
            scores = scores.view(b, n, end - begin, last - first)
            if mask is not None:
                scores[..., since - first :].add_(mask)
            pattern = torch.softmax(scores, -1, out=scores)
            if learns:
                patterns.append(pattern)
            made = torch.bmm(pattern.view(b * g, -1, last - first), values[:, first:last])
            z[:, begin:end] = made.view(b, n, end - begin, width).transpose(1, 2)
        ctx.save_for_backward(queries, keys, values, *patterns)
        ctx.scale, ctx.tiles, ctx.groups = scale, tiles, g
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, *patterns = ctx.saved_tensors
        b, n, _s, h = queries.shape
        g, t = ctx.groups, keys.shape[1]
        grad_z = grads[0].transpose(1, 2)
        grad_q = queries.new_empty(queries.shape)
        grad_k, grad_v = Sum(keys), Sum(values)
        for (begin, end, first, last, _, _), pattern in zip(reversed(ctx.tiles), reversed(patterns), strict=True):
            rows = grad_z[:, :, begin:end].reshape(b * g, -1, values.shape[-1])
            flat = pattern.view(b * g, -1, last - first)
            grad_v.add(first, last, torch.bmm(flat.transpose(1, 2), rows))
            grad = torch.bmm(rows, values[:, first:last].transpose(1, 2)).view_as(pattern)
            torch.ops.aten._softmax_backward_data.out(grad, pattern, -1, pattern.dtype, grad_input=grad)
            flat = grad.view_as(flat)
            grad_q[:, :, begin:end] = scaled_product(flat, keys[:, first:last], ctx.scale).view(b, n, end - begin, h)
            rows = queries[:, :, begin:end].reshape(b * g, -1, h)
            grad_k.add(first, last, scaled_product(flat.transpose(1, 2), rows, ctx.scale))
        by_token = (x.total.view(b, g, t, -1).transpose(1, 2) for x in (grad_k, grad_v))
        return grad_q.transpose(1, 2), *by_token, None, None


def scaled_product(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """scale x y, x (B, r, i), y (B, i, c): scaled as it is written, not in a pass of its own."""
    return torch.baddbmm(x.new_empty(x.shape[0], x.shape[1], y.shape[2]), x, y, beta=0, alpha=scale)


class Sum:
    """Adds up parts (B, last - first, h) into (B, t, h); one that covers everything and comes first is not copied."""

    def __init__(self, like: Tensor):
        self.like = like
        self.made: Tensor | None = None

    def add(self, first: int, last: int, part: Tensor) -> None:
        if self.made is None and part.shape == self.like.shape:
            self.made = part
            return
        self.made = self.total
        self.made[:, first:last].add_(part)

    @property
    def total(self) -> Tensor:
        return torch.zeros_like(self.like) if self.made is None else self.made


class BandedConfig(KernelConfig, kind="banded"):
    block: int = Field(BLOCK, gt=0)

    def build(self, ctx: BuildContext) -> Banded:
        return Banded(self.block)
