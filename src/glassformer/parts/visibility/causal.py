from __future__ import annotations

from torch import Tensor

from glassformer.parts.core.base import BuildContext
from glassformer.parts.visibility.base import Visibility, VisibilityConfig


class Causal(Visibility):
    """Causal mask, k <= q: a token attends to itself and earlier tokens."""

    causal = only_order = sees_itself = True

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return k_idx <= q_idx

    def keys_seen(self, t: int) -> float:
        return (t + 1) / 2


class CausalConfig(VisibilityConfig, kind="causal", words="causal"):
    def build(self, ctx: BuildContext) -> Causal:
        return Causal()
