"""Attention sinks, and the few huge activations of the stream that cause them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassformer.dynamics import massive
from glassformer.errors import WorkError
from glassformer.introspection import at_rest, capture, eager, looking, rows_of
from glassformer.lens import style
from glassformer.lens.reading import Reading
from glassformer.lens.tables import attention_table, draw_table, figure_size, heads_of, strongest
from glassformer.model import Model
from glassformer.parts.core.running import Look
from glassformer.parts.precision import exact
from glassformer.parts.visibility import Visibility

ABOVE = 0.3
"""Mass on the first token above which Gu et al. 2024 (2410.10781) call a head a sink."""
QUERIES = 1024
"""Number of queries whose visible keys are counted at once."""


@dataclass(frozen=True, eq=False, repr=False)
class AttentionSinks(Reading):
    """Mean attention of heads to the first token: `mass` (layers, heads). NaN if a layer has no such head."""

    title: ClassVar[str] = "Attention sinks"

    mass: Float[Tensor, "l n"]
    length: int
    uniform: Float[Tensor, " l"]
    """Mass (layers,) that uniform attention would give to the first token: (1/T) Σ_i [i attends to 0] / number of keys
    that i attends to. It is H_T / T, the mean of 1/i, for causal attention, and 1 / T for bidirectional attention."""

    @property
    def rate(self) -> float:
        """Sink rate: the share of heads whose mass is above 0.3."""
        known = self.mass[~self.mass.isnan()]
        return float((known > ABOVE).double().mean())

    def __str__(self) -> str:
        best = ", ".join(f"layer {layer} head {head} {mass:.2f}" for layer, head, mass in strongest(self.mass, 5))
        alike = " or ".join(dict.fromkeys(f"{mass:.2f}" for mass in self.uniform.tolist() if mass == mass))
        return (
            f"sink rate {self.rate:.0%}: heads with more than {ABOVE} of their attention on the first of {self.length} "
            f"tokens (all alike: {alike})\nstrongest: {best}"
        )

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"rate": self.rate}

    def figure(self, width: float | None = None, height: float | None = None) -> Any:
        """Returns a matplotlib figure of `width` x `height` inches, by default as large as the table needs."""
        wide, high = figure_size(self.mass)
        return super().figure(width or wide, height or high)

    def draw(self, figure: Any) -> None:
        ax = style.axes(figure, title=f"Attention sinks: {self.rate:.0%} of the heads", x="head", y="layer")
        draw_table(ax, self.mass, label="mean attention to the first token", high=1.0)


def attention_sinks(model: Model, tokens: Int[Tensor, "b s"]) -> AttentionSinks:
    """Returns every head's mean attention to the first token, Σ_i A_i0 / T, over the queries i of all rows of tokens
    (b, T); the first query counts with 1.

    Xiao et al. 2023, 2309.17453; Gu et al. 2024, 2410.10781, whose sink rate is the share of heads above 0.3 at T = 64:
    shorter texts give more, as there are fewer keys (`uniform`). Sinks are healthy; a window that drops the first
    tokens breaks a model that has them. Raises RequestError for a model without attention heads."""
    tokens = rows_of(model, tokens)
    counts = heads_of(model, "mixer.pattern")
    with at_rest(model):
        seen = capture(model, tokens, "layers.*.mixer.pattern", reduce=lambda pattern: exact(pattern[..., 0]))
    found = [seen.get(f"layers.{at}.mixer.pattern") for at in range(len(counts))]
    mass = attention_table([None if one is None else one.mean((0, 2)) for one in found])
    length, mixers = tokens.shape[1], [layer.mixer for layer in eager(model).layers]
    alike = [
        evenly(mixer.visibility.sized(length), length, lambda queries, keys: keys == 0) if n else math.nan
        for mixer, n in zip(mixers, counts, strict=True)
    ]
    return AttentionSinks(mass, length, torch.tensor(alike, dtype=torch.float64))


def evenly(visibility: Visibility, length: int, value: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Returns the mean of `value(queries (r, 1), keys (t,))` under uniform attention of `length` queries, each giving
    all its visible keys equal weight."""
    keys, one = torch.arange(length), torch.tensor(0)
    means = []
    for part in keys.split(QUERIES):
        queries = part[:, None]
        seen = visibility.visible(one, one, queries, keys)
        means.append((seen * value(queries, keys)).sum(-1).double() / seen.sum(-1).clamp(min=1))
    return float(torch.cat(means).mean())


@dataclass(frozen=True)
class MassiveActivation:
    """One massive activation: an element of the stream at a depth (0 after the embedding, i after layer i - 1)."""

    depth: int
    row: int
    position: int
    dimension: int
    value: float
    ratio: float
    """Ratio of |value| to the median |x| of the hidden state that has this element."""


@dataclass(frozen=True, eq=False, repr=False)
class MassiveActivations(Reading):
    """Massive activations of a text (elements of the stream far larger than the median): `found`, largest first.
    `largest` (depths, 3), the three largest |x|, and `median` (depths,) of |x|, are means over rows."""

    title: ClassVar[str] = "Massive activations"

    found: list[MassiveActivation]
    largest: Float[Tensor, "l k"]
    median: Float[Tensor, " l"]

    def __str__(self) -> str:
        depth = int((self.largest[:, 0] / self.median).nan_to_num(0.0).argmax())
        size, usual = float(self.largest[depth, 0]), float(self.median[depth])
        times = f", {size / usual:,.0f} times the median {usual:.3g}" if usual else ""
        most = f"most uneven at depth {depth}: {size:.1f}{times}"
        if not self.found:
            return f"no massive activation (above 100 and 1,000 times the median of its hidden state)\n{most}"
        depths, dimensions, positions = (
            sorted({getattr(one, name) for one in self.found}) for name in ("depth", "dimension", "position")
        )
        return (
            f"{len(self.found)} massive activations at depths {_few(depths)}, in dimensions {_few(dimensions)} of "
            f"tokens {_few(positions)}\n{most}"
        )

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"found": [vars(one) for one in self.found]}

    def draw(self, figure: Any) -> None:
        dimensions = sorted({one.dimension for one in self.found})
        said = f"massive in dimensions {_few(dimensions)}" if dimensions else "no massive activation"
        ax = style.axes(figure, title=f"Magnitudes of the stream: {said}", x="depth (0: embedding)", y="|x|")
        depths = range(len(self.median))
        for rank, values in enumerate(self.largest.T):
            ax.plot(depths, values, label=("largest", "second", "third")[rank], marker="o", markersize=3, linewidth=1.4)
        ax.plot(depths, self.median, label="median", color=style.MUTED, linewidth=1.4)
        ax.plot(depths, (1000 * self.median).clamp(min=100), label="massive from here", color=style.MUTED,
                linestyle=(0, (4, 3)), linewidth=0.9)  # fmt: skip
        ax.set_yscale("log")
        ax.minorticks_off()
        style.legend(ax, loc="upper left", bbox_to_anchor=(1, 1))


def massive_activations(model: Model, tokens: Int[Tensor, "b s"]) -> MassiveActivations:
    """Returns the massive activations of a text: elements with |x| > 100 and |x| >= 1,000 times the median |x| of their
    hidden state (all tokens of a row), after the embedding and after every layer. Sun et al. 2024, 2402.17762, section
    2.

    In trained models a few fixed dimensions of the first token, or of a separator, have them from an early layer to the
    last but one; heads with sinks attend to that token. They make activations hard to quantise."""
    tokens = rows_of(model, tokens)
    seen: list[tuple[Tensor, Tensor]] = []
    found: list[MassiveActivation] = []

    def look(x: Tensor, first: int, total: int) -> None:
        here, depth = massive(x), len(seen)
        if not x.isfinite().all():
            raise WorkError(
                f"the stream is not a number at depth {depth}: there is nothing to read in this model", code="diverged"
            )
        size = exact(x).abs().flatten(1)
        seen.append((size.topk(min(3, size.shape[1])).values.mean(0).cpu(), here.median.cpu().double().mean()))
        for row, position, dimension in here.mask.nonzero().tolist():
            value = float(x[row, position, dimension])
            ratio = abs(value) / float(here.median[row]) if here.median[row] else math.inf
            found.append(MassiveActivation(depth, row, position, dimension, value, ratio))

    looks: dict[str, Look] = {f"layers.{at}.resid_post": look for at in range(len(eager(model).layers))}
    with torch.no_grad(), at_rest(model), looking(model, {"embed": look, **looks}):
        eager(model).hidden_states(tokens)
    found.sort(key=lambda one: -abs(one.value))
    return MassiveActivations(found, torch.stack([top for top, _ in seen]), torch.stack([mid for _, mid in seen]))


def _few(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers[:6]) + (f" and {len(numbers) - 6} more" if numbers[6:] else "")
