"""Attention with sites on its scores and its pattern."""

from __future__ import annotations

import torch
from torch import Tensor

from glassformer.parts.base import BuildContext
from glassformer.parts.cost import Cost, Number, Shape
from glassformer.parts.kernel import AttentionCall, Kernel, attention_rows, naive_attention
from glassformer.parts.site import Site


def attend(kernel: Kernel, call: AttentionCall, scores: Site, pattern: Site) -> Tensor:
    """z (b, s, n, hv) of the call, with its scores and pattern (b, n, s, t) at the two sites.

    Where a site is edited, z comes from the definition, which alone has them to hand. Where one is looked at, they are
    computed beside the kernel, whose result stays the same."""
    if scores.edited or pattern.edited:
        return naive_attention(call, on_scores=scores, on_pattern=pattern)
    z = kernel(call)
    if scores.looks or pattern.looks:
        _show(call, scores, pattern)
    return z


@torch.no_grad()
def _show(call: AttentionCall, scores: Site, pattern: Site) -> None:
    s = call.q.shape[1]
    for first, some_scores, some_pattern in attention_rows(call):
        scores.show(some_scores, first, s)
        pattern.show(some_pattern, first, s)


def attention_cost(ctx: BuildContext, shape: Shape, value_dim: int, keys: Number, calls: int = 1) -> Cost:
    """Of q k^T and the pattern's product with v for queries that meet so many keys; selectively kept are z and the
    logarithm of each row's sum."""
    n, g, h = ctx.n_heads, ctx.n_kv_heads, ctx.head_dim
    calls *= shape.passes
    return Cost(
        flops=calls * 2 * n * (h + value_dim) * shape.tokens * keys,
        kept_selective=shape.keeps(n * value_dim) + shape.keeps(n, torch.float32),
        moved_bytes=calls * shape.tokens * (n + g) * (h + value_dim) * shape.products.itemsize,
    )
