"""Mean distance between a token and the tokens that a head attends to, by layer and head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassformer.introspection import at_rest, eager, looking, rows_of
from glassformer.lens import style
from glassformer.lens.reading import Reading
from glassformer.lens.sinks import evenly
from glassformer.lens.tables import attention_table, draw_table, figure_size, heads_of, strongest
from glassformer.model import Model
from glassformer.parts.precision import exact


@dataclass(frozen=True, eq=False, repr=False)
class AttentionDistance(Reading):
    """Mean number of tokens between a query and the keys that it attends to, by weight: `distance` (layers, heads). NaN
    if a layer has no such head."""

    title: ClassVar[str] = "Attention distance"

    distance: Float[Tensor, "l n"]
    apart: Float[Tensor, "l n"]
    """Mean distance (layers, heads) over all keys but the first token of the text, to which idle heads give their
    weight."""
    uniform: Float[Tensor, " l"]
    """Mean distance (layers,) of a head that attends uniformly to all visible keys; NaN for a layer without heads."""
    length: int
    """Number of tokens of the text."""

    @property
    def by_layer(self) -> Float[Tensor, " l"]:
        """Mean distance (layers,) over the heads of each layer, without the first token; NaN for a layer without
        heads."""
        return self.apart.nanmean(1)

    def __str__(self) -> str:
        rows = ", ".join(f"{layer} {mean:.1f}" for layer, mean in enumerate(self.by_layer.tolist()) if mean == mean)
        alike = " or ".join(dict.fromkeys(f"{one:.1f}" for one in self.uniform.tolist() if one == one))
        ends = {"farthest": self.apart, "nearest": -self.apart}
        lines = [
            f"mean distance in tokens, first token apart, over {self.length} tokens (uniform attention: {alike})",
            f"by layer: {rows}",
        ]
        for name, table in ends.items():
            some = [f"layer {layer} head {head} {abs(value):.1f}" for layer, head, value in strongest(table, 3)]
            lines.append(f"{name}: {', '.join(some)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        means = self.by_layer.tolist()
        return super().to_dict() | {"by_layer": [value if math.isfinite(value) else None for value in means]}

    def figure(self, width: float | None = None, height: float | None = None) -> Any:
        """Returns a matplotlib figure of `width` x `height` inches, by default as large as the table needs."""
        wide, high = figure_size(self.distance)
        return super().figure(width or wide + 4.0, height or high)

    def draw(self, figure: Any) -> None:
        left, right = style.axes(figure, 1, 2, title="Attention distance, first token apart").flat
        draw_table(left, self.apart, label="mean distance [tokens]")
        left.set(xlabel="head", ylabel="layer")
        layers = range(len(self.uniform))
        shown = {"first token apart": self.by_layer, "all tokens": self.distance.nanmean(1), "uniform": self.uniform}
        for at, (name, values) in enumerate(shown.items()):
            line = (0, (4, 3)) if name == "uniform" else "-"
            right.plot(layers, values, label=name, color=style.COLOURS[at], linestyle=line, marker="o", markersize=3)
        right.set(xlabel="layer", ylabel="mean of the heads [tokens]")
        right.set_ylim(bottom=0)
        style.whole_ticks(right, "x")
        style.legend(right)


def attention_distance(model: Model, tokens: Int[Tensor, "b s"]) -> AttentionDistance:
    """Returns the mean attention distance of every head, Σ_ij A_ij |i - j| / Σ_ij A_ij over all rows of tokens (b, s).

    The mean attention distance of Vig & Belinkov 2019, 1906.04284, who found it to grow with depth in GPT-2, and of
    Dosovitskiy et al. 2020, 2010.11929. `apart` leaves out the keys at position 0: a head that rests on the first token
    has a large distance without reading anything. Raises RequestError for a model without attention heads."""
    tokens = rows_of(model, tokens)
    counts, length = heads_of(model, "mixer.pattern"), tokens.shape[1]
    looks = {f"layers.{at}.mixer.pattern": Distances() for at, n in enumerate(counts) if n}
    with torch.no_grad(), at_rest(model), looking(model, looks):
        eager(model).hidden_states(tokens)
    found = [looks.get(f"layers.{at}.mixer.pattern") for at in range(len(counts))]
    whole, apart = (attention_table([None if one is None else one.mean(since) for one in found]) for since in (0, 1))
    mixers = [layer.mixer for layer in eager(model).layers]
    alike = [
        evenly(mixer.visibility.sized(length), length, lambda queries, keys: (queries - keys).abs()) if n else math.nan
        for mixer, n in zip(mixers, counts, strict=True)
    ]
    return AttentionDistance(whole, apart, torch.tensor(alike, dtype=torch.float64), length)


class Distances:
    """Observer of an attention pattern that sums, for each head, the weights and the weights times distances: over all
    keys, and over all but the first."""

    def __init__(self) -> None:
        self.sums: dict[int, list[Tensor]] = {}

    def __call__(self, x: Tensor, first: int, total: int) -> None:
        weights = exact(x).sum(0)  # (n, rows, t)
        queries = torch.arange(first, first + weights.shape[1], device=weights.device)[:, None]
        gaps = (queries - torch.arange(weights.shape[2], device=weights.device)).abs()
        for since in (0, 1):
            some = weights[..., since:]
            new = [(some * gaps[:, since:]).sum((1, 2)), some.sum((1, 2))]
            before = self.sums.get(since)
            self.sums[since] = new if before is None else [a + b for a, b in zip(before, new, strict=True)]

    def mean(self, since: int) -> Tensor:
        """Returns each head's mean distance (heads,) to the keys from position `since` on; 0 for a head that gives
        these keys no weight."""
        far, mass = self.sums[since]
        return far / mass.clamp(min=1e-12)
