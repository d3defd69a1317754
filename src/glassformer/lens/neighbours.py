"""Similar tokens according to the model: the nearest rows of its embedding, or of its head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from glassformer.errors import RequestError, did_you_mean
from glassformer.introspection import eager, rows_of
from glassformer.lens import style
from glassformer.lens.maps import spell
from glassformer.lens.reading import Reading
from glassformer.model import Model

CHUNK = 8192
"""Number of rows of the vocabulary that are compared at once."""
Measure = Literal["cosine", "dot", "distance"]


@dataclass(frozen=True, eq=False, repr=False)
class Neighbours(Reading):
    """Nearest k neighbours of each of m tokens, nearest first: ids (m, k), closeness (m, k), and words."""

    title: ClassVar[str] = "Nearest tokens"

    of: str
    by: Measure
    tokens: list[int]
    words: list[str]
    ids: Int[Tensor, "m k"]
    closeness: Float[Tensor, "m k"]
    neighbours: list[list[str]]

    def __str__(self) -> str:
        lines = [f"nearest rows of the {self.of} by {self.by}"]
        for word, near, values in zip(self.words, self.neighbours, self.closeness.tolist(), strict=True):
            found = ", ".join(f"{one!r} {value:.2f}" for one, value in zip(near, values, strict=True))
            lines.append(f"{word!r}: {found}")
        return "\n".join(lines)

    def figure(self, width: float | None = None, height: float | None = None) -> Any:
        """Returns a matplotlib figure of `width` x `height` inches, by default as large as the table needs."""
        return super().figure(width or 1.2 + 0.8 * self.ids.shape[1], height or 1.0 + 0.36 * len(self.tokens))

    def draw(self, figure: Any) -> None:
        ax = style.axes(figure, title=f"Nearest rows of the {self.of}", x="nearest first")
        drawn = style.heat(ax, self.closeness, label=self.by, signed=bool((self.closeness < 0).any()))
        for row, near in enumerate(self.neighbours):
            for column, word in enumerate(near):
                dark = sum(drawn.cmap(drawn.norm(float(self.closeness[row, column])))[:3]) < 1.6
                ax.text(column, row, style.legible(word, 10), ha="center", va="center", fontsize=7,
                        color=style.PAPER if dark else style.INK)  # fmt: skip
        style.words(ax, self.words, "y")
        ax.set_xticks(range(self.ids.shape[1]), range(1, self.ids.shape[1] + 1))


def embedding_neighbours(
    model: Model,
    tokens: int | Sequence[int] | Int[Tensor, "..."],
    k: int = 10,
    tokenizer: Any = None,
    by: Measure = "cosine",
    of: Literal["embedding", "head"] = "embedding",
) -> Neighbours:
    """Returns the k tokens whose rows of the embedding E (v, d), or of the head, are nearest to the rows of `tokens`.

    by="cosine"    E_i . E_j / (|E_i| |E_j|)
    by="dot"       E_i . E_j
    by="distance"  -|E_i - E_j|

    The token itself is left out. Training places tokens that occur in the same contexts near each other (Mikolov et al.
    2013, 1301.3781). The vocabulary is compared by chunks, so a product (m, v) is never held. With a `tokenizer` the
    result includes texts. Raises RequestError for an id outside the vocabulary, and for k < 1 or k >= v."""
    given = [tokens] if isinstance(tokens, int) else tokens
    table, ids = table_for(model, of), rows_of(model, given).flatten().tolist()
    near, closeness = nearest(table, table[ids], k, by, without=torch.tensor(ids)[:, None])
    words = [[spell(token, tokenizer) for token in row] for row in near.tolist()]
    return Neighbours(of, by, ids, [spell(token, tokenizer) for token in ids], near, closeness, words)


def table_for(model: Model, of: str) -> Float[Tensor, "v d"]:
    """Returns the table (v, d) with a row for each token that `of` names: "embedding" or "head", which may be the
    same."""
    whole = eager(model)
    if of == "embedding":
        return whole.embedding.applied().detach()
    if of != "head":
        raise RequestError(
            f"of={of!r} is neither embedding nor head{did_you_mean(of, ('embedding', 'head'))}",
            code="unknown", field="of", value=of,
        )  # fmt: skip
    if whole.head.packed is not None:
        return whole.head.packed.weight.detach()
    return (whole.embedding.applied() if whole.head.weight is None else whole.head.weight).detach()


@torch.no_grad()
def nearest(
    table: Float[Tensor, "v d"],
    directions: Float[Tensor, "m d"],
    k: int = 10,
    by: Measure = "cosine",
    without: Int[Tensor, "m w"] | None = None,
) -> tuple[Int[Tensor, "m k"], Float[Tensor, "m k"]]:
    """Returns the k rows of `table` nearest to each direction, and their closeness, in fp32; rows in `without` are
    excluded.

    >>> near, _ = nearest(E, (E[king] - E[man] + E[woman])[None], without=torch.tensor([[king, man, woman]]))"""
    if by not in CLOSENESS:
        raise RequestError(
            f"by={by!r} is not a measure; use {', '.join(CLOSENESS)}{did_you_mean(by, CLOSENESS)}",
            code="unknown", field="by", value=by,
        )  # fmt: skip
    left = len(table) - (0 if without is None else without.shape[1])
    if not 1 <= k <= left:
        raise RequestError(
            f"k={k} must be between 1 and {left}, the other tokens of the vocabulary", code="range", field="k", value=k
        )
    asked = directions.float()
    best = torch.full((len(asked), 0), float("-inf"), device=table.device)
    ids = torch.zeros((len(asked), 0), dtype=torch.long, device=table.device)
    for first in range(0, len(table), CHUNK):
        rows = table[first : first + CHUNK].float()
        close = CLOSENESS[by](asked, rows)
        if without is not None:
            inside = (without.to(table.device) >= first) & (without.to(table.device) < first + len(rows))
            at = (without.to(table.device) - first).clamp(0, len(rows) - 1)
            close.scatter_reduce_(1, at, torch.where(inside, -torch.inf, torch.inf), "amin")
        best = torch.cat([best, close], dim=1)
        ids = torch.cat([ids, torch.arange(first, first + len(rows), device=table.device).expand_as(close)], dim=1)
        best, order = best.topk(min(k, best.shape[1]), dim=1)
        ids = ids.gather(1, order)
    return ids.cpu(), best.cpu()


CLOSENESS = {
    "cosine": lambda asked, rows: F.normalize(asked, dim=-1) @ F.normalize(rows, dim=-1).T,
    "dot": lambda asked, rows: asked @ rows.T,
    "distance": lambda asked, rows: -torch.cdist(asked, rows, compute_mode="donot_use_mm_for_euclid_dist"),
}
