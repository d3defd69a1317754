from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.parts.base import BuildContext
from glassformer.parts.kernel.base import Index, Kernel, KernelConfig, Once, ScoreBias, anew, indices
from glassformer.parts.precision import wide
from glassformer.parts.visibility import Visibility


def _same(x: Tensor) -> Tensor:
    return x


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
        repeats = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))  # (b, t, n, h)
        scores = wide(torch.einsum("bsnh,btnh->bnst", q, k)) * (scale or q.shape[-1] ** -0.5)
        at = indices(q, k, index)
        if bias is not None:
            scores = bias(scores, *at)
        visible = visibility.visible(*at)
        scores = on_scores(scores.masked_fill(~visible, float("-inf")))
        pattern = torch.softmax(scores, dim=-1).masked_fill(~visible.any(-1, keepdim=True), 0.0)
        pattern = F.dropout(on_pattern(pattern).to(v.dtype), dropout)
        return torch.einsum("bnst,btnh->bsnh", pattern, v)


class NaiveConfig(KernelConfig, kind="naive"):
    def build(self, ctx: BuildContext) -> Naive:  # type: ignore[override]
        return Naive()
