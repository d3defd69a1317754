"""Pictures of a model's position encodings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from glassformer.config import ModelConfig, allocate
from glassformer.errors import RequestError, check_whole
from glassformer.introspection import eager
from glassformer.lens import style
from glassformer.lens.reading import Reading, plain
from glassformer.model import Model
from glassformer.parts.building import fill
from glassformer.parts.position import Plot

NONE = "none"
LARGEST_TABLE = 1 << 28


@dataclass(frozen=True, eq=False, repr=False)
class PositionPicture(Reading):
    """Plots of a model's position encodings. `plots`: encoding -> name -> Plot, for a text of `length` tokens. `where`:
    encoding -> layers that use it, [] if it is added to the embedding; "none" -> layers without an encoding."""

    title: ClassVar[str] = "Position encodings"

    length: int
    where: dict[str, list[int]]
    plots: dict[str, dict[str, Plot]]

    def __str__(self) -> str:
        return "\n".join(f"{name}: {self._place(layers)}" for name, layers in self.where.items())

    def _place(self, layers: list[int]) -> str:
        return f"layers {spans(layers)}" if layers else "added to the embedding"

    def to_dict(self) -> dict[str, Any]:
        plots = {name: {title: vars(plot) for title, plot in some.items()} for name, some in self.plots.items()}
        return {"length": self.length, "where": self.where, "plots": plain(plots)}

    def figure(self, width: float | None = None, height: float | None = None) -> Any:
        """Returns a matplotlib figure of `width` x `height` inches, by default as large as the plots need."""
        columns = max(len(some) for some in self.plots.values())
        return super().figure(width or 3.7 * columns, height or 3.1 * len(self.plots))

    def draw(self, figure: Any) -> None:
        columns = max(len(some) for some in self.plots.values())
        rows = style.axes(figure, len(self.plots), columns, title=str(self))
        for row, (name, some) in zip(rows, self.plots.items(), strict=True):
            for ax in row[len(some) :]:
                ax.set_visible(False)
            for ax, (title, plot) in zip(row, some.items(), strict=False):
                above = f"{name.split('(')[0]}: {title}" if len(self.plots) > 1 else title
                ax.set_title(above, loc="left", fontsize=9, color=style.INK)
                draw_plot(ax, plot)


def draw_plot(ax: Any, plot: Plot) -> None:
    """Draws a plot as lines, or as colours if it names no lines; unevenly spaced points have a logarithmic axis."""
    ax.set_xlabel(plot.x)
    ax.set_ylabel(plot.y)
    style.whole_ticks(ax, "x")
    if len(plot.at) > 2 and (plot.at.diff() != plot.at[1] - plot.at[0]).any():
        ax.set_xscale("log")
    if not plot.lines:
        style.mesh(ax, plot.at, plot.values)
        style.whole_ticks(ax, "y")
        return
    if plot.log:
        ax.set_yscale("log")
    many = len(plot.lines) > len(style.COLOURS)
    for index, (name, values) in enumerate(zip(plot.lines, plot.values, strict=True)):
        shade = {"color": style.colour_map()(0.25 + 0.75 * index / len(plot.lines))} if many else {}
        named = name if not many or index in (0, len(plot.lines) - 1) else None
        mark = {"marker": "o", "markersize": 3} if len(plot.at) <= 32 else {}
        ax.plot(
            plot.at.numpy(), values.numpy(), label=named, linewidth=1.4 if len(plot.at) <= 256 else 0.9, **mark, **shade
        )
    if len(plot.lines) > 4 and not many:
        style.legend(ax, loc="upper left", bbox_to_anchor=(1, 1))
    elif len(plot.lines) > 1:
        style.legend(ax)


def position_picture(model: Model | ModelConfig, length: int | None = None) -> PositionPicture:
    """Returns plots of the model's position encodings over a text of `length` tokens (by default its context).

    sinusoidal  PE(p, 2i) = sin(p / base^(2i/d)), PE(p, 2i+1) = cos(the same): by dimension and position, and
                PE(p) . PE(p+k) = sum_i cos(k / base^(2i/d)), equal for every p. Vaswani et al. 2017, 1706.03762
    learned     cos(E_p, E_p') of the table's rows, its mean by distance, |E_p|; of a config, an untrained table
    rotary      wavelength 2 pi / theta_i of pair i, cos(theta_i k) at distance k, and its mean over the pairs: the
                score of two equal vectors k apart. Scaled frequencies are drawn next to the plain ones.
                Su et al. 2021, 2104.09864
    alibi       slopes m_n = 2^(-8n/N), the bias -m_n k, and e^(-m_n k), the factor of a key's weight.
                Press et al. 2022, 2108.12409

    Layers that differ are drawn separately. Raises RequestError for a model without positions."""
    made = eager(model) if isinstance(model, nn.Module) else drawn_from(model)
    if length is None and made.config is None:
        raise RequestError(
            "this model was made without a config, so its context is not known; give length=",
            code="missing", field="length",
        )  # fmt: skip
    limit = made.embedding.limit or math.inf
    length = min(made.config.context, limit) if length is None else length
    check_whole("length", length, 2)
    if length > limit:
        raise RequestError(
            f"length={length:,} is past this model's learned positions, which end at {limit:,}",
            code="range", field="length", value=length,
        )  # fmt: skip
    parts: dict[str, Any] = {}
    where: dict[str, list[int]] = {}
    if made.embedding.position is not None:
        parts[name := repr(made.embedding.position)] = made.embedding.position
        where[name] = []
    for layer, block in enumerate(made.layers):
        part = block.mixer.attention_position
        name = NONE if part is None else repr(part)
        where.setdefault(name, []).append(layer)
        if part is not None:
            parts.setdefault(name, part)
    if not parts:
        raise RequestError(
            "position=null: this model has no position encoding; its only order is that of the mask",
            code="missing", field="position",
        )  # fmt: skip
    plots = {name: part.picture(length) for name, part in parts.items()}
    if blank := [name for name, some in plots.items() if not some]:
        raise RequestError(
            f"position={blank[0]} has no picture; give the part a method picture(length)",
            code="unsupported", field="position", value=blank[0],
        )  # fmt: skip
    if made.embedding.position is not None:
        where.pop(NONE, None)
    return PositionPicture(length, where, plots)


def drawn_from(config: ModelConfig) -> Model:
    """Returns a model of this config on the meta device; only its position encodings have values."""
    model = config.outline()
    position: Any = model.embedding.position
    if position is not None and (values := sum(p.numel() for p in position.parameters())):
        if values > LARGEST_TABLE:
            raise RequestError(
                f"{position} has {values:,} values, too many to draw without weights; load the model",
                code="range", field="position", value=values,
            )  # fmt: skip
        allocate(position, "cpu")
        fill(position, config.begin(seed=0), "embedding.position")
    return model


def spans(layers: list[int]) -> str:
    """Formats indices as ranges: [0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
