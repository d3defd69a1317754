from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.parts.core.base import BuildContext
from glassformer.parts.kernel.base import AttentionCall, Kernel, KernelConfig, softmax_over
from glassformer.parts.precision import wide

VALUES_PER_BLOCK = 1 << 22


def _same(x: Tensor) -> Tensor:
    return x


def attention_pattern(call: AttentionCall, on_scores: Callable[[Tensor], Tensor] = _same) -> Tensor:
    """Returns the attention pattern (b, n, s, t): the softmax of the scores over the keys that each query attends to;
    zero for a query without keys. Sinks, which are not keys, take a share of the weight. `on_scores` may replace the
    scores (b, n, s, t)."""
    k = call.k.repeat_interleave(call.q.shape[2] // call.k.shape[2], dim=2)  # (b, t, n, h)
    scores = wide(torch.einsum("bsnh,btnh->bnst", call.q, k)) * call.score_scale
    at = call.at
    if call.bias is not None:
        scores = call.bias(scores, *at)
    visible = call.visibility.visible(*at)
    scores = on_scores(scores.masked_fill(~visible, float("-inf")))
    return softmax_over(scores, call.sinks).masked_fill(~visible.any(-1, keepdim=True), 0.0)


def naive_attention(
    call: AttentionCall,
    on_scores: Callable[[Tensor], Tensor] = _same,
    on_pattern: Callable[[Tensor], Tensor] = _same,
) -> Tensor:
    """Returns z (b, s, n, hv) of a call by the definition of attention, one line per symbol. `on_scores` and
    `on_pattern` may replace scores and pattern (b, n, s, t)."""
    pattern = on_pattern(attention_pattern(call, on_scores))
    pattern = F.dropout(pattern.to(call.v.dtype), call.dropout)
    v = call.v.repeat_interleave(call.q.shape[2] // call.v.shape[2], dim=2)  # (b, t, n, h)
    return torch.einsum("bnst,btnh->bsnh", pattern, v)


def attention_rows(call: AttentionCall) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields (index of the first query, scores, pattern) for blocks of r queries, each (b, n, r, t): the result of
    `attention_pattern`, in bounded memory."""
    b, s, n, _ = call.q.shape
    q_idx, k_idx = call.tokens
    rows = max(1, VALUES_PER_BLOCK // (b * n * call.k.shape[1]))
    for first in range(0, s, rows):
        scores: list[Tensor] = []

        def keep(x: Tensor, scores: list[Tensor] = scores) -> Tensor:
            scores.append(x)
            return x

        part = slice(first, first + rows)
        pattern = attention_pattern(call.replace(q=call.q[:, part], index=(q_idx[..., part], k_idx)), keep)
        yield first, scores[0], pattern


class Naive(Kernel):
    """Kernel of `naive_attention`, the definition; memory O(s t)."""

    name = "naive"

    def attend(self, call: AttentionCall) -> Tensor:
        return naive_attention(call)


class NaiveConfig(KernelConfig, kind="naive"):
    def build(self, ctx: BuildContext) -> Naive:
        return Naive()
