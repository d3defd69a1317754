from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from glassformer.parts.core.base import BuildContext
from glassformer.parts.first_order import first_order
from glassformer.parts.kernel.base import (
    AttentionCall,
    CallFacts,
    HeadLayout,
    KeptTensors,
    Kernel,
    KernelConfig,
    ScoreBias,
    masked_bias,
    pattern_bytes,
    softmax_over,
)
from glassformer.parts.precision import wide
from glassformer.parts.visibility import Spans, Visibility

BLOCK = 128
LEAST_BLOCK = 32


class Tile(NamedTuple):
    """Tile of attention: one block of queries, given by the index of its first query and the index after its last,
    against the keys of the intervals `spans`. `mask` is added to the score columns from `since` on (columns are these
    keys in order); None if every query of the block attends to all of them."""

    begin: int
    end: int
    spans: Spans
    since: int
    mask: Tensor | None


class Banded(Kernel):
    """Attention by blocks of queries, each against only the keys that one of its queries attends to.

    Under a causal mask block i reads keys 0 .. its end, half the work of the whole square; under a window of w it reads
    its own block and the w - 1 keys before, so time and memory are O(s (w + block)) for any s; with several intervals
    (`Visibility.spans`) it reads those. A window with gaps is a plain one over every rate-th token. For the backward
    pass the kernel keeps the pattern of each block in the matmuls' dtype.
    """

    name = "banded"

    def __init__(self, block: int = BLOCK):
        self.block = block

    def attend(self, call: AttentionCall) -> Tensor:
        rate = call.visibility.stride
        if rate > 1 and call.sees_itself and call.q.shape[1] == call.k.shape[1]:
            s = call.q.shape[1]
            z = self.attend(_folded(call, rate))
            return z.unflatten(0, (-1, rate)).transpose(1, 2).flatten(1, 2)[:, :s]
        # Masks travel outside autograd, so a learned bias takes the other path, which torch differentiates.
        if call.dropout or call.learned or not call.additive or not call.sees_itself:
            return self._general(call)
        tiles = call.once(("tiles", self.block, *call.key), lambda: self.tiles(call))
        return _Tiles.apply(call.q, call.k, call.v, call.score_scale, tiles, call.sinks)

    def keeps(self, facts: CallFacts, visibility: Visibility, heads: HeadLayout) -> KeptTensors:
        """Returns the sizes of the tensors kept of a training call: the pattern of each block, and copies of keys and
        values laid out token by token or head by head."""
        if (rate := visibility.stride) > 1:
            folds = facts._replace(batch=facts.batch * rate, s=-(-facts.s // rate), t=-(-facts.t // rate))
            kept = self.keeps(folds, visibility.folded(0), heads._replace(by_head=False))
            copies = facts.batch * heads.n * folds.s * rate * facts.head_dim * facts.dtype.itemsize
            return KeptTensors(kept.own + copies)
        n, g = heads.n, heads.g
        blocks = [(end - begin, spans) for begin, end, spans in self.blocks(visibility, facts.s, facts.t)]
        area = self.pairs(visibility, facts.s, facts.t)
        pairs = facts.batch * n * area
        per_head = facts.batch * facts.head_dim * facts.dtype.itemsize
        if facts.additive and not facts.dropout and not facts.learned:
            apart = not heads.by_head or facts.sinks  # k and v, padded with a key for the sinks
            width = heads.value_dim or facts.head_dim
            copies = facts.batch * g * (facts.t + facts.sinks) * (width + facts.head_dim * apart)
            pairs += facts.batch * n * facts.s * facts.sinks
            return KeptTensors((pairs + copies) * facts.dtype.itemsize, given="q" if apart else "qk")
        read = sum(_width(spans) for _, spans in blocks)
        copies = n * facts.s + 2 * g * read
        visible = area + facts.s  # bools: for pairs of query and key, and for queries with any key
        return KeptTensors(pattern_bytes(facts, pairs) + visible + copies * per_head)

    def pairs(self, visibility: Visibility, s: int, t: int) -> int:
        return sum((end - begin) * _width(spans) for begin, end, spans in self.blocks(visibility, s, t))

    def blocks(self, visibility: Visibility, s: int, t: int) -> list[tuple[int, int, Spans]]:
        """Returns the blocks of queries, ascending, as (first, end, spans): queries first .. end-1 of the s, and the
        intervals of keys that one of them may attend to. The queries are the last s of t tokens."""
        size, before = self._size(visibility), t - s
        ends = {*range(size - before % size, s, size), *(cut - before for cut in visibility.cuts(t))}
        edges = [0, *sorted(end for end in ends if 0 < end < s), s]
        return [(begin, end, visibility.spans(before + begin, before + end, t)) for begin, end in pairwise(edges)]

    def _size(self, visibility: Visibility) -> int:
        """Returns the number of queries in a block: the size of the visibility's tiles (queries with equal masks), or a
        part or multiple of this size."""
        tile = visibility.tile or self.block
        if tile < self.block:
            return tile * max(1, LEAST_BLOCK // tile) if self.block >= LEAST_BLOCK else tile
        parts = -(-tile // self.block)
        return tile // parts if tile % parts == 0 else self.block

    def tiles(self, call: AttentionCall) -> list[Tile]:
        """Returns the tiles of a call, with their masks: the bias or 0 for visible pairs, -inf for others."""
        visibility, s, t = call.visibility, call.q.shape[1], call.k.shape[1]
        b, n, q_idx, k_idx = call.at
        made = []
        masks: dict[Hashable, Tensor] = {}
        for begin, end, spans in self.blocks(visibility, s, t):
            first, last, since, alike = t - s + begin, t - s + end, 0, None
            if call.plain:  # keys before the block are all visible if only order decides
                since = first if visibility.causal else t
            elif call.bias is None:
                since = visibility.sure(first, last, t)
            if since >= _width(spans):
                made.append(Tile(begin, end, spans, since, None))
                continue
            if call.bias is None:
                alike = visibility.alike(first, last, t)
            mask = masks.get(alike) if alike is not None else None
            if mask is None:
                at = b, n, q_idx[:, :, begin:end], _within(k_idx, spans, 3)[..., since:]
                mask = masked_bias(visibility, call.bias, at).detach().to(call.q.dtype)
                if alike is not None:
                    masks[alike] = mask
            made.append(Tile(begin, end, spans, since, mask))
        return made

    def _general(self, call: AttentionCall) -> Tensor:
        """Returns z (b, s, n, hv) of any call, also one with a learned bias, indices, gaps or dropout: block by block,
        with torch's backward pass."""
        q, k, v = call.q, call.k, call.v
        batch, s, n, h = q.shape
        t, g = k.shape[1], k.shape[2]
        b, heads, q_idx, k_idx = call.at
        blocks = self.blocks(call.visibility, s, t)
        if call.index is not None:  # keys have no order
            blocks = [(begin, end, [(0, t)]) for begin, end, _ in blocks]
        sizes = [end - begin for begin, end, _ in blocks]
        queries = q.unflatten(2, (g, n // g)).permute(0, 2, 3, 1, 4).split(sizes, 3)  # (b, g, n/g, s, h)
        biases = [None] * len(blocks) if call.bias is None else call.bias.by_block(sizes)
        spans_of = [spans for _, _, spans in blocks]
        keys, values = _each(k.permute(0, 2, 3, 1), spans_of, 3), _each(v.transpose(1, 2), spans_of, 2)
        out = []
        for (begin, end, spans), bias, own, near, far in zip(blocks, biases, queries, keys, values, strict=True):
            rows = own.reshape(batch, g, -1, h)
            scores = wide(rows @ near).view(batch, n, end - begin, -1) * call.score_scale  # near (b, g, h, read)
            at = b, heads, q_idx[:, :, begin:end], _within(k_idx, spans, 3)
            if bias is not None:
                scores = bias(scores, *at)
            visible = call.visibility.visible(*at)
            scores = scores.masked_fill(~visible, float("-inf"))
            pattern = softmax_over(scores, call.sinks).masked_fill(~visible.any(-1, keepdim=True), 0.0).to(v.dtype)
            pattern = F.dropout(pattern, call.dropout).reshape(batch, g, -1, pattern.shape[-1])
            out.append((pattern @ far).view(batch, n, end - begin, v.shape[-1]))
        return torch.cat(out, dim=2).transpose(1, 2)


def _folded(call: AttentionCall, rate: int) -> AttentionCall:
    """Returns the call with every `rate`-th token as a separate sequence: row b becomes rows b rate .. b rate + rate -
    1, padded with tokens that no query attends to."""
    rest = -call.q.shape[1] % rate

    def fold(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, 0, rest)).unflatten(1, (-1, rate)).transpose(1, 2).flatten(0, 1)

    visibility = call.once(("folded", *call.visibility.key), lambda: call.visibility.folded(rest))
    bias = call.bias

    def bend(score: Tensor, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        assert bias is not None
        at = [(index * rate + b % rate).clamp(max=call.q.shape[1] - 1) for index in (q_idx, k_idx)]
        return bias(score, b // rate, n, *at)

    folded = None if bias is None else ScoreBias(bend, bias.additive, ("folded", rate, bias.key), bias.parameters)
    return call.replace(q=fold(call.q), k=fold(call.k), v=fold(call.v), visibility=visibility, bias=folded)


def _width(spans: Spans) -> int:
    return sum(end - begin for begin, end in spans)


def _each(x: Tensor, spans_of: list[Spans], dim: int) -> Iterator[Tensor]:
    """Yields the intervals of x along the axis `dim` for each block, concatenated. For a gradient x is cut once, at all
    ends of intervals: the gradient of a slice would have the size of x, and that of a piece has the size of the
    piece."""
    if not x.requires_grad:
        yield from (_within(x, spans, dim) for spans in spans_of)
        return
    ends = sorted({0, x.shape[dim], *(end for spans in spans_of for span in spans for end in span)})
    pieces, index = x.split([end - begin for begin, end in pairwise(ends)], dim), {end: i for i, end in enumerate(ends)}
    for spans in spans_of:
        yield torch.cat([piece for begin, end in spans for piece in pieces[index[begin] : index[end]]], dim)


def _within(x: Tensor, spans: Spans, dim: int) -> Tensor:
    """Returns a copy of the intervals `spans` of x along the axis `dim`, concatenated; a view for a single interval."""
    parts = [x.narrow(dim, begin, end - begin) for begin, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class _Tiles(torch.autograd.Function):
    """Autograd function of attention over tiles. Every query attends to at least its own key here, so no row of a
    pattern is empty. Sinks are an additional key of zeros, which every tile reads last.

    Grouped heads become rows: the n/g query heads that share keys are stacked in one matmul. The pattern overwrites the
    scores in place, and the gradient of the scores that of the pattern, while they are still in cache."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, tiles: list[Tile], sinks: Tensor | None
    ) -> Tensor:
        b, s, n, h = q.shape
        t, g = k.shape[1], k.shape[2]
        queries = q.transpose(1, 2)  # (b, n, s, h)
        keys, values = (x.transpose(1, 2).reshape(b * g, t, x.shape[-1]) for x in (k, v))
        if sinks is not None:
            keys, values = (F.pad(x, (0, 0, 0, 1)) for x in (keys, values))
            tiles = [tile._replace(spans=[*tile.spans, (t, t + 1)]) for tile in tiles]
        width = v.shape[-1]
        z = q.new_empty(b, s, n, width)
        learns = any(ctx.needs_input_grad)
        patterns = []
        for begin, end, spans, since, mask in tiles:
            rows = queries[:, :, begin:end].reshape(b * g, -1, h)
            scores = scaled_product(rows, _within(keys, spans, 1).transpose(1, 2), scale)
            scores = scores.view(b, n, end - begin, -1)
            if mask is not None:
                scores[..., since : since + mask.shape[-1]].add_(mask)
            if sinks is not None:
                scores[..., -1] = sinks.view(-1, 1)
            pattern = torch.softmax(scores, -1, out=scores)
            if learns:
                patterns.append(pattern)
            made = torch.bmm(pattern.view(b * g, -1, pattern.shape[-1]), _within(values, spans, 1))
            z[:, begin:end] = made.view(b, n, end - begin, width).transpose(1, 2)
        ctx.save_for_backward(queries, keys, values, *patterns)
        spans_alone = [tile._replace(mask=None) for tile in tiles]  # the context's tensors live until the loss is freed
        ctx.scale, ctx.tiles, ctx.groups, ctx.sinks = scale, spans_alone, g, sinks
        return z

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, *patterns = ctx.saved_tensors
        b, n, _s, h = queries.shape
        g, t = ctx.groups, keys.shape[1] - (ctx.sinks is not None)
        grad_z = grads[0].transpose(1, 2)
        grad_q = queries.new_empty(queries.shape)
        grad_k, grad_v = Sum(keys), Sum(values)
        grad_sinks = None if ctx.sinks is None else torch.zeros_like(ctx.sinks)
        for (begin, end, spans, _, _), pattern in zip(reversed(ctx.tiles), reversed(patterns), strict=True):
            rows = grad_z[:, :, begin:end].reshape(b * g, -1, values.shape[-1])
            flat = pattern.view(b * g, -1, pattern.shape[-1])
            grad_v.add(spans, torch.bmm(flat.transpose(1, 2), rows))
            grad = torch.bmm(rows, _within(values, spans, 1).transpose(1, 2)).view_as(pattern)
            torch.ops.aten._softmax_backward_data.out(grad, pattern, -1, pattern.dtype, grad_input=grad)
            if grad_sinks is not None:
                grad_sinks += grad[..., -1].sum((0, 2), dtype=grad_sinks.dtype)
            flat = grad.view_as(flat)
            of_q = scaled_product(flat, _within(keys, spans, 1), ctx.scale)
            grad_q[:, :, begin:end] = of_q.view(b, n, end - begin, h)
            rows = queries[:, :, begin:end].reshape(b * g, -1, h)
            grad_k.add(spans, scaled_product(flat.transpose(1, 2), rows, ctx.scale))
        by_token = (x.total[:, :t].unflatten(0, (b, g)).transpose(1, 2) for x in (grad_k, grad_v))
        return grad_q.transpose(1, 2), *by_token, None, None, grad_sinks


def scaled_product(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Returns scale x y for x (B, r, i) and y (B, i, c), scaled while the product is written, without a separate
    pass."""
    return torch.baddbmm(x.new_empty(x.shape[0], x.shape[1], y.shape[2]), x, y, beta=0, alpha=scale)


class Sum:
    """Sum, in a tensor (B, t, h), of parts (B, width, h) that each belong to the tokens of some intervals; if the first
    part covers all tokens it becomes the sum, without a copy."""

    def __init__(self, like: Tensor):
        self.like = like
        self.made: Tensor | None = None

    def add(self, spans: Spans, part: Tensor) -> None:
        if self.made is None and part.shape == self.like.shape:
            self.made = part
            return
        self.made = self.total
        at = 0
        for first, last in spans:
            self.made[:, first:last].add_(part[:, at : at + last - first])
            at += last - first

    @property
    def total(self) -> Tensor:
        return torch.zeros_like(self.like) if self.made is None else self.made


class BandedConfig(KernelConfig, kind="banded"):
    block: int = Field(BLOCK, gt=0)

    def build(self, ctx: BuildContext) -> Banded:
        return Banded(self.block)
