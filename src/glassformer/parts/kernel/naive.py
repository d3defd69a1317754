from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.parts.base import BuildContext
from glassformer.parts.kernel.base import Index, Kernel, KernelConfig, Once, ScoreBias, anew, indices
from glassformer.parts.precision import wide
from glassformer.parts.visibility import Visibility

VALUES_PER_BLOCK = 1 << 22


def _same(x: Tensor) -> Tensor:
    return x


def attention_pattern(
    q: Tensor,
    k: Tensor,
    visibility: Visibility,
    bias: ScoreBias | None = None,
    scale: float | None = None,
    index: Index | None = None,
    on_scores: Callable[[Tensor], Tensor] = _same,
) -> Tensor:
    """softmax of the scores over the keys each query sees, (b, n, s, t); a row that sees none is zero."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)  # (b, t, n, h)
    scores = wide(torch.einsum("bsnh,btnh->bnst", q, k)) * (scale or q.shape[-1] ** -0.5)
    at = indices(q, k, index)
    if bias is not None:
        scores = bias(scores, *at)
    visible = visibility.visible(*at)
    scores = on_scores(scores.masked_fill(~visible, float("-inf")))
    return torch.softmax(scores, dim=-1).masked_fill(~visible.any(-1, keepdim=True), 0.0)


def attention_rows(
    q: Tensor,
    k: Tensor,
    visibility: Visibility,
    bias: ScoreBias | None = None,
    scale: float | None = None,
    index: Index | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first row, scores, pattern) by blocks of queries: what `attention_pattern` makes, in bounded memory."""
    b, s, n, _ = q.shape
    t = k.shape[1]
    q_idx, k_idx = index or (torch.arange(t - s, t, device=q.device), torch.arange(t, device=q.device))
    rows = max(1, VALUES_PER_BLOCK // (b * n * t))
    for first in range(0, s, rows):
        scores: list[Tensor] = []

        def keep(x: Tensor, scores: list[Tensor] = scores) -> Tensor:
            scores.append(x)
            return x

        part = slice(first, first + rows)
        pattern = attention_pattern(q[:, part], k, visibility, bias, scale, (q_idx[..., part], k_idx), keep)
        yield first, scores[0], pattern


class Naive(Kernel):
    """The definition, one line per symbol; memory O(s t). It alone hands out scores and pattern (b, n, s, t)."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visibility: Visibility,
        bias: ScoreBias | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        index: Index | None = None,
        once: Once = anew,
        on_scores: Callable[[Tensor], Tensor] = _same,
        on_pattern: Callable[[Tensor], Tensor] = _same,
    ) -> Tensor:
        pattern = attention_pattern(q, k, visibility, bias, scale, index, on_scores)
        pattern = F.dropout(on_pattern(pattern).to(v.dtype), dropout)
        v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)  # (b, t, n, h)
        return torch.einsum("bnst,btnh->bsnh", pattern, v)


class NaiveConfig(KernelConfig, kind="naive"):
    def build(self, ctx: BuildContext) -> Naive:
        return Naive()
