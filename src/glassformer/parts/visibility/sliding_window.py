from __future__ import annotations

from pydantic import Field
from torch import Tensor

from glassformer.errors import check_whole
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.words import Word, whole
from glassformer.parts.visibility.base import Visibility, VisibilityConfig


class SlidingWindow(Visibility):
    """Visibility of a window, 0 <= q - k < window: a token attends to itself and the window - 1 tokens before it.

    Beltagy et al. 2020 (2004.05150), in the causal form and count of Mistral 7B (2310.06825).
    """

    causal = only_order = sees_itself = True

    def __init__(self, window: int):
        check_whole("window", window)
        self.window = self.reach = window

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return (k_idx <= q_idx) & (q_idx - k_idx < self.window)

    def keys_seen(self, t: int) -> float:
        w = min(self.window, t)
        return (w * (w + 1) / 2 + (t - w) * w) / t


class SlidingWindowConfig(VisibilityConfig, kind="sliding_window", words=Word("window", whole("window"), "256")):
    window: int = Field(gt=0, le=1 << 28)

    def build(self, ctx: BuildContext) -> SlidingWindow:
        return SlidingWindow(self.window)
