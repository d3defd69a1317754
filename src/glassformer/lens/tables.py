"""A number for every layer and head: gathered, drawn, told."""

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
    """How many heads each layer has at `mixer.z` or `mixer.pattern`, 0 where it has no such site, or no heads.
    RequestError where none has."""
    known, layers = sites(model), eager(model).layers
    heads = [layer.mixer.heads for layer in layers]
    counts = [one.n_heads if one and f"layers.{at}.{site}" in known else 0 for at, one in enumerate(heads)]
    if not any(counts):
        raise RequestError(
            f"no layer of this model has a site {site}: it has no attention heads", code="unsupported", field="model"
        )
    return counts


def table_of(rows: Sequence[Tensor | None]) -> Tensor:
    """(layers, heads) fp64 of each layer's (heads,); NaN where a layer has no such head."""
    known = [row.cpu().double() for row in rows if row is not None]
    table = torch.full((len(rows), max(len(row) for row in known)), math.nan, dtype=torch.float64)
    for at, row in enumerate(rows):
        if row is not None:
            table[at, : len(row)] = row
    return table


def attention_table(rows: Sequence[Tensor | None]) -> Tensor:
    """`table_of` what was measured of attention. WorkError where that is not a number."""
    for at, row in enumerate(rows):
        if row is not None and not row.isfinite().all():
            raise WorkError(
                f"the attention of layer {at} is not a number: there is nothing to read in this model", code="diverged"
            )
    return table_of(rows)


def strongest(table: Tensor, count: int, signed: bool = False) -> list[tuple[int, int, float]]:
    """(layer, head, value) of the `count` largest values, or of those farthest from 0."""
    ranked = (table.abs() if signed else table).nan_to_num(nan=-math.inf).flatten().argsort(descending=True)
    places = [divmod(flat, table.shape[1]) for flat in ranked[:count].tolist()]
    return [(layer, head, float(table[layer, head])) for layer, head in places if not table[layer, head].isnan()]


def figure_size(table: Tensor, tables: int = 1) -> tuple[float, float]:
    """Inches that so many of these tables need side by side."""
    layers, heads = table.shape
    return min(16.0, tables * max(2.2, 0.22 * heads) + 2.2), min(10.0, max(3.0, 0.2 * layers + 1.0))


def draw_table(ax: Any, table: Tensor, **heat: Any) -> Any:
    """The table as colours, with whole numbers along its sides."""
    from matplotlib.ticker import MaxNLocator

    drawn = style.heat(ax, table, **heat)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    ax.tick_params(length=0)
    ax.spines[:].set(visible=True, color=style.LINE, linewidth=0.8)
    return drawn


def shared_bar(figure: Any, drawn: Any, axes: Any, label: str) -> None:
    """One bar for several tables of one scale."""
    bar = figure.colorbar(drawn, ax=axes, fraction=0.046, pad=0.02, aspect=30)
    bar.set_label(label, color=style.INK, fontsize=9)
    bar.ax.tick_params(colors=style.MUTED, labelsize=8, length=2)
    bar.outline.set_visible(False)
