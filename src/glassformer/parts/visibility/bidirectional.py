from __future__ import annotations

import torch
from torch import Tensor

from glassformer.parts.core.base import BuildContext
from glassformer.parts.visibility.base import Visibility, VisibilityConfig


class Bidirectional(Visibility):
    """Visibility in which every token attends to every token (encoders)."""

    only_order = sees_itself = True

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return torch.ones_like(q_idx == k_idx)

    def keys_seen(self, t: int) -> float:
        return float(t)


class BidirectionalConfig(VisibilityConfig, kind="bidirectional", words="bidirectional"):
    def build(self, ctx: BuildContext) -> Bidirectional:
        return Bidirectional()
