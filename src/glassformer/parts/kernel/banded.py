from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from glassformer.parts.base import BuildContext
from glassformer.parts.kernel.base import Index, Kernel, KernelConfig, ScoreBias
from glassformer.parts.precision import wide
from glassformer.parts.visibility import Visibility

BLOCK = 128


class Banded(Kernel):
    """Blocks of queries against only those keys that one of them can see.

    Under a causal mask block i reads keys 0 .. its end, half the work of the whole square; under a window of w it
    reads its own block and the w - 1 keys before, so time and memory are O(s (w + block)) for any s.
    """

    def __init__(self, block: int = BLOCK):
        self.block = block

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
    ) -> Tensor:
        b, s, n, h = q.shape
        t, g = k.shape[1], k.shape[2]
        scale = scale or h**-0.5
        device = q.device
        q_idx, k_idx = index or (torch.arange(t - s, t, device=device), torch.arange(t, device=device))
        rows, heads = torch.arange(b, device=device).view(b, 1, 1, 1), torch.arange(n, device=device).view(1, n, 1, 1)
        # (b g, n/g rows of s, h): heads that share keys become rows of one product
        queries = (q * scale).unflatten(2, (g, n // g)).permute(0, 2, 3, 1, 4)
        keys, values = k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)  # (b, g, h, t), (b, g, t, h)
        out = []
        for i in range(0, s, self.block):
            j = min(i + self.block, s)
            first, last = self._span(visibility, t - s + i, t - s + j, t) if index is None else (0, t)
            part = queries[:, :, :, i:j].reshape(b, g, -1, h)  # (b, g, n/g * block, h)
            scores = wide(part @ keys[..., first:last]).view(b, n, j - i, last - first)
            at = rows, heads, q_idx[i:j].view(1, 1, -1, 1), k_idx[first:last].view(1, 1, 1, -1)
            if bias is not None:
                scores = bias(scores, *at)
            visible = visibility.visible(*at)
            scores = scores.masked_fill(~visible, float("-inf"))
            pattern = torch.softmax(scores, -1).masked_fill(~visible.any(-1, keepdim=True), 0.0).to(v.dtype)
            pattern = F.dropout(pattern, dropout).view(b, g, -1, last - first)
            out.append((pattern @ values[:, :, first:last]).view(b, n, j - i, h))
        return torch.cat(out, dim=2).transpose(1, 2)

    @staticmethod
    def _span(visibility: Visibility, start: int, stop: int, t: int) -> tuple[int, int]:
        """First key and end of the keys that queries start .. stop-1 may see."""
        first = 0 if visibility.reach is None else max(0, start - visibility.reach + 1)
        return first, stop if visibility.causal else t


class BandedConfig(KernelConfig, kind="banded"):
    block: int = Field(BLOCK, gt=0)

    def build(self, ctx: BuildContext) -> Banded:  # type: ignore[override]
        return Banded(self.block)
