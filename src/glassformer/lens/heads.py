"""Attention of heads on a repeated text: scores per head of the relative position attended to.

A row is r random tokens, all different if the vocabulary allows, and the same r again. Only the repetition is
predictable, so a head that attends to the right position has detected it.

    ... A B C ... A B C ...        at the second A, an induction head attends to the first B: the token after A before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.introspection import at_rest, eager, looking, rows_of
from glassformer.lens import style
from glassformer.lens.reading import Reading
from glassformer.lens.tables import attention_table, draw_table, figure_size, heads_of, shared_bar, strongest
from glassformer.model import Model
from glassformer.parts.precision import exact

KINDS = ("induction", "previous token", "first token", "duplicate token")


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores(Reading):
    """Scores of attention heads. `scores`: kind -> (layers, heads), mean attention, 0 to 1, to the position of that
    kind, such as the previous token. NaN if a layer has no such head."""

    title: ClassVar[str] = "Head scores"

    scores: dict[str, Float[Tensor, "l n"]]
    length: int
    """Number of tokens of the repeated block."""
    batch: int

    def __str__(self) -> str:
        lines = [f"mean attention on {self.batch} rows of {self.length} random tokens, given twice"]
        for kind, table in self.scores.items():
            best = [f"layer {layer} head {head} {value:.2f}" for layer, head, value in strongest(table, 3)]
            lines.append(f"{kind}: {', '.join(best)}")
        return "\n".join(lines)

    def figure(self, width: float | None = None, height: float | None = None) -> Any:
        """Returns a matplotlib figure of `width` x `height` inches, by default as large as the tables need."""
        wide, high = figure_size(next(iter(self.scores.values())), len(self.scores))
        return super().figure(width or wide, height or high)

    def draw(self, figure: Any) -> None:
        axes = style.axes(figure, 1, len(self.scores), x="head", y="layer", sharey=True)
        axes = list(np.atleast_1d(axes).flat)
        for ax, (kind, table) in zip(axes, self.scores.items(), strict=True):
            drawn = draw_table(ax, table, high=1.0, bar=False)
            ax.set_title(kind, loc="left", color=style.INK, fontsize=10)
            ax.label_outer(remove_inner_ticks=True)
        shared_bar(figure, drawn, axes, "mean attention")


def induction_scores(model: Model, length: int = 50, batch: int = 4, seed: int = 0) -> HeadScores:
    """Returns each head's mean attention from a token to the token after its earlier occurrence: A_(i, i - length + 1),
    the mean over the second half.

    The prefix-matching score of Olsson et al. 2022, 2209.11895; with the found token copied to the output it is a
    mechanism of in-context learning. Needs two layers: one to store the previous token, one to match it."""
    return head_scores(model, length, batch, seed, ("induction",))


def previous_token_scores(model: Model, length: int = 50, batch: int = 4, seed: int = 0) -> HeadScores:
    """Returns each head's mean attention from a token to the previous one: A_(i, i - 1), the mean over all but the
    first."""
    return head_scores(model, length, batch, seed, ("previous token",))


def first_token_scores(model: Model, length: int = 50, batch: int = 4, seed: int = 0) -> HeadScores:
    """Returns each head's mean attention from a token to the first one of the text: A_(i, 0), the mean over all but the
    first."""
    return head_scores(model, length, batch, seed, ("first token",))


def duplicate_token_scores(model: Model, length: int = 50, batch: int = 4, seed: int = 0) -> HeadScores:
    """Returns each head's mean attention from a token to its earlier occurrence: A_(i, i - length), the mean over the
    second half (Wang et al. 2022, 2211.00593)."""
    return head_scores(model, length, batch, seed, ("duplicate token",))


def head_scores(
    model: Model, length: int = 50, batch: int = 4, seed: int = 0, kinds: Sequence[str] = KINDS
) -> HeadScores:
    """Returns the scores of all heads for several kinds, from one pass over `batch` rows of `length` random tokens and
    the same again; maps are never kept.

    Raises RequestError for a model without attention heads, a length that the model cannot read, and an unknown
    kind."""
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if length < 2 or batch < 1:
        raise RequestError(
            f"length={length} and batch={batch}: at least 2 tokens are repeated, in at least 1 row",
            code="range", field="length" if length < 2 else "batch", value=length if length < 2 else batch,
        )  # fmt: skip
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise RequestError(
            f"kinds={unknown[0]!r}: use {', '.join(KINDS)}", code="unknown", field="kinds", value=unknown[0]
        )
    counts = heads_of(model, "mixer.pattern")
    tokens = rows_of(model, repeated_tokens(eager(model).vocab_size, length, batch, seed))
    looks = {f"layers.{at}.mixer.pattern": Masses(kinds, length) for at, n in enumerate(counts) if n}
    with torch.no_grad(), at_rest(model), looking(model, looks):
        eager(model).hidden_states(tokens)
    found = [looks.get(f"layers.{at}.mixer.pattern") for at in range(len(counts))]
    tables = {kind: attention_table([None if one is None else one.means[kind] for one in found]) for kind in kinds}
    return HeadScores(tables, length, batch)


def repeated_tokens(vocab_size: int, length: int, batch: int, seed: int) -> Int[Tensor, "b s"]:
    """Returns random token ids (batch, 2 length) whose second half repeats the first; in a row all of a half are
    different, if the vocabulary has enough."""
    generator = torch.Generator().manual_seed(seed)
    if vocab_size < length:
        half = torch.randint(vocab_size, (batch, length), generator=generator)
    else:
        half = torch.stack([torch.randperm(vocab_size, generator=generator)[:length] for _ in range(batch)])
    return torch.cat((half, half), dim=1)


class Masses:
    """Observer of an attention pattern that measures each head's mean attention to the position that a kind of score
    asks for, such as the previous token: kind -> (heads,)."""

    def __init__(self, kinds: Sequence[str], length: int):
        # Kind -> (distance back, None for the start of the text; first query that has it).
        known = {"induction": (length - 1, length), "previous token": (1, 1), "first token": (None, 1)}
        places = {**known, "duplicate token": (length, length)}
        self.places = {kind: places[kind] for kind in kinds}
        self.means: dict[str, Tensor] = {}

    def __call__(self, x: Tensor, first: int, total: int) -> None:
        for kind, (back, least) in self.places.items():
            since = max(0, least - first)
            rows = x[:, :, since:]  # queries first + since, ...
            there = rows[..., 0] if back is None else rows.diagonal(first + since - back, 2, 3)
            mass = exact(there).sum((0, 2)) / (len(x) * (total - least))
            self.means[kind] = self.means.get(kind, 0) + mass
