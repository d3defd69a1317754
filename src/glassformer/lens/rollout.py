"""Attention rollout: the share of each input token that attention has carried to each position by each depth.

    A~_l = (mean over heads of A_l + I) / 2          R_l = A~_l R_{l-1},  R_{-1} = I        (s, t)

The half of I represents the residual stream. Abnar & Zuidema 2020, 2005.00928. Values, norms and FFNs do not enter:
rollout shows possible sources of information, not what a prediction rests on. In a deep model whose heads rest on the
first token, all of it ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from glassformer.errors import check_whole
from glassformer.introspection import Tiles, at_rest, eager, looking
from glassformer.lens import style
from glassformer.lens.maps import heaviest, label, one_row, pattern_of, pooled, shade, span, spelled, weight_bar
from glassformer.lens.reading import Reading
from glassformer.model import Model


@dataclass(frozen=True, eq=False, repr=False)
class Rollout(Reading):
    """Attention rollout of a text. `flow` (l, S, T): layers, positions, input tokens; every row of a layer sums to one.
    With `tile` > 1 a cell is the largest of tile x tile tokens. `last` (l, s) is the row of the last position, never
    pooled."""

    title: ClassVar[str] = "Attention rollout"

    flow: Tensor
    last: Tensor
    words: list[str]
    tile: int = 1

    def __str__(self) -> str:
        about = f"attention rollout through {len(self.flow)} layers, {len(self.words)} tokens{pooled(self.tile)}"
        return f"{about}\n{span(self.words, len(self.words) - 1)} draws on {heaviest(self.last[-1], self.words)}"

    def figure(self, width: float = 11.0, height: float = 5.2) -> Any:
        return super().figure(width, height)

    def draw(self, figure: Any) -> None:
        left, right = style.axes(figure, 1, 2, title=f"attention rollout{pooled(self.tile)}").flat
        shade(left, self.flow[-1], self.tile)
        label(left, self.words, self.tile)
        left.set_title("after the last layer", loc="left", color=style.INK, fontsize=9)
        left.set(xlabel="input token", ylabel="place")
        image = shade(right, self.last)
        right.set_aspect("auto")
        label(right, self.words, which="x")
        right.set_title("the last token, by depth", loc="left", color=style.INK, fontsize=9)
        right.set(xlabel="input token", ylabel="layer")
        style.whole_ticks(right, "y")
        weight_bar(figure, image, [left, right], "share")


def attention_rollout(
    model: Model, tokens: Tensor, tokenizer: Any = None, pool: int = 512, words: Sequence[str] | None = None
) -> Rollout:
    """Returns the attention rollout of tokens (1, s) through every layer; kept at most pool x pool.

    One pass of the model, 8 s^2 bytes. Raises RequestError for a layer without attention, a token outside the
    vocabulary and more than one row."""
    tokens = one_row(model, tokens)
    labels = spelled(tokens, tokenizer, words)
    check_whole("pool", pool)
    rolling = _Rolling(torch.eye(tokens.shape[1], device=tokens.device), pool)
    names = [pattern_of(model, layer) for layer in range(len(eager(model).layers))]
    with at_rest(model), looking(model, dict.fromkeys(names, rolling)), torch.no_grad():
        eager(model).hidden_states(tokens)
    return Rollout(torch.stack(rolling.kept), torch.stack(rolling.last), labels, -(-tokens.shape[1] // pool))


class _Rolling:
    """Observer of all layers' attention patterns, lowest layer first, by blocks of queries: it computes the rollout R_l
    of layer l from R_{l-1}."""

    def __init__(self, flow: Tensor, pool: int):
        self.flow, self.pool = flow, pool
        self.next = torch.empty_like(flow)
        self.kept: list[Tensor] = []
        self.last: list[Tensor] = []

    def __call__(self, pattern: Tensor, first: int, total: int) -> None:
        rows = slice(first, first + pattern.shape[2])
        self.next[rows] = (pattern[0].mean(0).to(self.flow) @ self.flow + self.flow[rows]) / 2
        if rows.stop == total:
            self.flow, self.next = self.next, self.flow
            tiles = Tiles(self.flow[None, None], total, self.pool)
            tiles.add(self.flow[None, None], list(range(total)))
            self.kept.append(tiles.values[0, 0].cpu())
            self.last.append(self.flow[-1].cpu().clone())
