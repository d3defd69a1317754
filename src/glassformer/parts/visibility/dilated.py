from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from glassformer.errors import RequestError, check_whole
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.words import Word, whole_number
from glassformer.parts.visibility.base import Visibility, VisibilityConfig
from glassformer.parts.visibility.sliding_window import SlidingWindow


class Dilated(Visibility):
    """Visibility of a window with gaps, q - k in {0, rate, 2 rate, ..., (window - 1) rate}: `window` keys, `rate`
    tokens apart.

    A query attends to `window` keys at most, and a decode state keeps the (window - 1) rate + 1 tokens that hold
    them.
    """

    causal = sees_itself = True

    def __init__(self, window: int, rate: int):
        check_whole("window", window)
        check_whole("rate", rate)
        self.window, self.stride = window, rate
        self.reach = (window - 1) * rate + 1

    @property
    def width(self) -> int:
        return self.window

    def folded(self, rest: int) -> SlidingWindow:
        return SlidingWindow(self.window)

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        back = q_idx - k_idx
        return (back >= 0) & (back < self.window * self.stride) & (back % self.stride == 0)

    def keys_seen(self, t: int) -> float:
        some = min(t, (self.window - 1) * self.stride + 1)
        full = t - some
        turns, rest = divmod(some, self.stride)  # query q < reach attends to q // rate + 1 keys
        return (full * self.window + self.stride * turns * (turns + 1) / 2 + rest * (turns + 1)) / t


def _read(word: str, text: str) -> dict[str, Any]:
    window, colon, rate = text.partition(":")
    if not colon:
        raise RequestError(
            f"{word}:{text}: give the window and the rate, such as {word}:64:4",
            code="missing", field=word, value=text, expected=f"{word}:WINDOW:RATE",
        )  # fmt: skip
    return {"window": whole_number(word, window), "rate": whole_number(word, rate)}


class DilatedConfig(VisibilityConfig, kind="dilated", words=Word("dilated", _read, "64:4")):
    """Config of a window with gaps: q - k in {0, rate, ..., (window - 1) rate}. Beltagy et al. 2020 (2004.05150), 3.1,
    causal.

    It loses if neighbours matter: with one rate in all layers, tokens whose distance is not a multiple of it never
    interact. Use it in some layers, and a plain window in the others.
    """

    window: int = Field(gt=0, le=1 << 28)
    rate: int = Field(gt=0, le=1 << 20)

    def build(self, ctx: BuildContext) -> Dilated:
        return Dilated(self.window, self.rate)
