from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import groupby
from typing import Any

from jaxtyping import Bool
from pydantic import Field, model_validator
from torch import Tensor

from glassformer.errors import RequestError, check_whole
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.words import Word, whole_number
from glassformer.parts.precision import at_hand
from glassformer.parts.visibility.base import Needed, Spans, Visibility, VisibilityConfig, joined


class Longformer(Visibility):
    """A window, and the first `globals` tokens of a document, which are always visible. Beltagy et al. 2020
    (2004.05150).

    causal       0 <= q - k < window, or k < globals and k <= q: the attention sinks of StreamingLLM (Xiao et al. 2023,
                 2309.17453). A decode state keeps window + globals tokens.
    two-sided    |q - k| <= window / 2, or k < globals, or q < globals: as published, window + 1 keys around each token,
                 and global tokens attend to everything. `LongformerAttention` gives them separate projections.

    The global tokens may also be passed with the text (`Model.forward`, `global_tokens`), only two-sided, in place of
    the first ones.

    Positions stay those of the text, which StreamingLLM renumbers.
    """

    sees_itself = absolute = True

    def __init__(self, window: int, globals: int = 1, causal: bool = True):
        check_whole("window", window)
        check_whole("globals", globals, 0)
        if not causal and window % 2:
            raise RequestError(code="range", field="window", value=window, expected="an even number, half on each side")
        self.window, self.globals, self.causal = window, globals, causal

    @property
    def needed(self) -> Needed:
        return Needed(self.globals, self.window) if self.causal else Needed(0, None)

    @property
    def width(self) -> int:
        return self.window + self.globals + (0 if self.causal else 1)

    @property
    def takes_globals(self) -> bool:
        return not self.causal

    def of_globals(self, tokens: Tensor) -> Visibility:
        return self if self.causal else Chosen(self.window, tokens)

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        back = q_idx - k_idx
        if self.causal:
            return (back >= 0) & ((back < self.window) | (k_idx < self.globals))
        return (back.abs() <= self.window // 2) | (k_idx < self.globals) | (q_idx < self.globals)

    def spans(self, first: int, last: int, t: int) -> Spans:
        if self.causal:
            return joined([(0, min(self.globals, last)), (max(0, first - self.window + 1), last)])
        if first < self.globals:
            return [(0, t)]
        half = self.window // 2
        return joined([(0, min(self.globals, t)), (max(0, first - half), min(t, last + half))])

    def sure(self, first: int, last: int, t: int) -> int:
        if not self.causal and last <= self.globals:
            return t
        return min(self.globals, t) if not self.causal or first >= self.globals else 0

    def alike(self, first: int, last: int, t: int) -> Hashable | None:
        begin, end = self.spans(first, last, t)[-1]
        return (last - first, begin - first, end - first) if begin > self.globals else None

    def cuts(self, t: int) -> tuple[int, ...]:
        return () if self.causal else (self.globals,)

    def keys_seen(self, t: int) -> float:
        g = min(self.globals, t)
        if self.causal:
            w = min(self.window, t)
            near = w * (w + 1) / 2 + (t - w) * w
            m = max(0, t - w)  # query w + i attends to min(i + 1, g) keys before its window
            far = min(m, g) * (min(m, g) + 1) / 2 + max(0, m - g) * g
            return (near + far) / t
        # pairs of a global token with any token, and of two others at most half a window apart
        u = t - g
        half = min(self.window // 2, max(u - 1, 0))
        return (t * t - u * u + u + 2 * (u * half - half * (half + 1) / 2)) / t if u else float(t)


class Chosen(Visibility):
    """Visibility of a two-sided `Longformer` with global tokens chosen by the caller: |q - k| <= window / 2, or q or k
    is global."""

    sees_itself = True

    def __init__(self, window: int, tokens: Bool[Tensor, "b t"]):
        self.window, self.tokens = window, tokens.bool()
        self.runs = tuple(_runs(self.tokens.any(0).tolist())) if at_hand(tokens) else None
        """Intervals of tokens that are global in some row; None if they are not known in advance."""

    @property
    def width(self) -> int | None:
        return None if self.runs is None else self.window + 1 + sum(end - begin for begin, end in self.runs)

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return ((q_idx - k_idx).abs() <= self.window // 2) | self.tokens[b, q_idx] | self.tokens[b, k_idx]

    def spans(self, first: int, last: int, t: int) -> Spans:
        if self.runs is None or any(begin < last and first < end for begin, end in self.runs):
            return [(0, t)]
        half = self.window // 2
        return joined([*self.runs, (max(0, first - half), min(t, last + half))])

    def cuts(self, t: int) -> tuple[int, ...]:
        return tuple(edge for run in self.runs or () for edge in run)

    def keys_seen(self, t: int) -> float:
        return Longformer(self.window, round(float(self.tokens.sum(1).float().mean())), causal=False).keys_seen(t)


def _runs(marks: list[bool]) -> Iterator[tuple[int, int]]:
    """Yields the intervals [start, end) in which all marks are True."""
    at = 0
    for mark, run in groupby(marks):
        begin, at = at, at + len(list(run))
        if mark:
            yield begin, at


def _read(word: str, text: str) -> dict[str, Any]:
    window, colon, first = text.partition(":")
    found = {"window": whole_number(word, window)}
    return {**found, "globals": whole_number(word, first)} if colon else found


class LongformerConfig(VisibilityConfig, kind="longformer", words=Word("longformer", _read, "64:4")):
    """Config of a window and the first tokens of a document: 0 <= q - k < window, or k < globals and k <= q
    (StreamingLLM, Xiao et al. 2023, 2309.17453). With causal=False |q - k| <= window / 2, or k < globals, or q <
    globals, as Beltagy et al. 2020 (2004.05150) published it.

    It loses if an answer is further back than the window and not a global token: each later layer reaches one window
    further, but only mixtures of tokens.
    """

    window: int = Field(gt=0, le=1 << 28)
    """Causal: number of tokens that a token attends to, itself included. Two-sided: half of this number on each side,
    and itself."""
    globals: int = Field(1, ge=0, le=1 << 20)
    causal: bool = True

    @model_validator(mode="after")
    def _halves(self) -> LongformerConfig:
        if not self.causal and self.window % 2:
            raise RequestError(
                f"window={self.window} is odd, but half of it must be on each side of a token",
                code="range", field="window", value=self.window,
            )  # fmt: skip
        return self

    def build(self, ctx: BuildContext) -> Longformer:
        return Longformer(self.window, self.globals, self.causal)
