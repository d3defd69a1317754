"""Tables of a number for every layer and head: collected, drawn, printed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from glassformer.errors import RequestError, WorkError
from glassformer.introspection import eager, sites
from glassformer.lens import style
from glassformer.model import Model


def heads_of(model: Model, site: str) -> list[int]:
    """Returns the number of heads of each layer at the site `mixer.z` or `mixer.pattern`, 0 for a layer without such a
    site, or without heads. Raises RequestError if all are 0."""
    known, layers = sites(model), eager(model).layers
    heads = [layer.mixer.heads for layer in layers]
    counts = [one.n_heads if one and f"layers.{at}.{site}" in known else 0 for at, one in enumerate(heads)]
    if not any(counts):
        raise RequestError(
            f"no layer of this model has a site {site}: it has no attention heads", code="unsupported", field="model"
        )
    return counts


def table_of(rows: Sequence[Tensor | None]) -> Tensor:
    """Returns a table (layers, heads) fp64 from each layer's values (heads,), None for a layer without values. NaN
    fills the places of heads that a layer does not have."""
    known = [row.cpu().double() for row in rows if row is not None]
    table = torch.full((len(rows), max(len(row) for row in known)), math.nan, dtype=torch.float64)
    for at, row in enumerate(rows):
        if row is not None:
            table[at, : len(row)] = row
    return table


def attention_table(rows: Sequence[Tensor | None]) -> Tensor:
    """Returns a table (layers, heads) of attention statistics, made as by `table_of`. Raises WorkError if a statistic
    is NaN."""
    for at, row in enumerate(rows):
        if row is not None and not row.isfinite().all():
            raise WorkError(
                f"the attention of layer {at} is not a number: there is nothing to read in this model", code="diverged"
            )
    return table_of(rows)


def strongest(table: Tensor, count: int, signed: bool = False) -> list[tuple[int, int, float]]:
    """Returns (layer, head, value) of the `count` largest values of a table, or with `signed` of those farthest from
    0."""
    ranked = (table.abs() if signed else table).nan_to_num(nan=-math.inf).flatten().argsort(descending=True)
    places = [divmod(flat, table.shape[1]) for flat in ranked[:count].tolist()]
    return [(layer, head, float(table[layer, head])) for layer, head in places if not table[layer, head].isnan()]


def figure_size(table: Tensor, tables: int = 1) -> tuple[float, float]:
    """Returns the size (width, height) in inches of a figure of `tables` tables of this shape in a row."""
    layers, heads = table.shape
    return min(16.0, tables * max(2.2, 0.22 * heads) + 2.2), min(10.0, max(3.0, 0.2 * layers + 1.0))


def draw_table(ax: Any, table: Tensor, **heat: Any) -> Any:
    """Draws a table as colours, with integers along its sides, and returns the image."""
    from matplotlib.ticker import MaxNLocator

    drawn = style.heat(ax, table, **heat)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    ax.tick_params(length=0)
    ax.spines[:].set(visible=True, color=style.LINE, linewidth=0.8)
    return drawn


def shared_bar(figure: Any, drawn: Any, axes: Any, label: str) -> None:
    """Draws one colour bar for several tables that have the same scale."""
    bar = figure.colorbar(drawn, ax=axes, fraction=0.046, pad=0.02, aspect=30)
    bar.set_label(label, color=style.INK, fontsize=9)
    bar.ax.tick_params(colors=style.MUTED, labelsize=8, length=2)
    bar.outline.set_visible(False)
