"""Style of figures: one background, one ink, eight colours that colour-blind readers can distinguish, two colour maps.

>>> ax = style.axes(figure, title="attention", x="key", y="query")
>>> style.heat(ax, pattern, label="weight", high=1.0)
>>> style.words(ax, tokens)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from glassformer.lens.page.words import visible

PAPER, INK, MUTED, RULE, LINE = "#fdfdfb", "#1a1e24", "#59626d", "#b5bac0", "#dfe1e0"
COLOURS = ("#0b62a8", "#b34700", "#0a7556", "#9b3d80", "#7d5c00", "#454c56", "#bf2848", "#5b4bc4")
BLUES = ("#fdfdfb", "#cfe3f4", "#7db4e0", "#2f7fc1", "#0b4f8a", "#062a4d")
"""Colours from zero, white, to large values, dark blue."""
BOTH_WAYS = ("#6e2500", "#b34700", "#eda06c", "#fdfdfb", "#7db4e0", "#0b62a8", "#06335c")
"""Colours from negative, orange, through zero to positive, blue."""
MOST_WORDS = 40


def axes(
    figure: Any, rows: int = 1, columns: int = 1, *, title: str = "", x: str = "", y: str = "", **layout: Any
) -> Any:
    """Returns the axes of one plot on `figure`, or an array (rows, columns) of axes with `title` over all. `layout` is
    passed to matplotlib's subplots."""
    figure.set_facecolor(PAPER)
    made = figure.subplots(rows, columns, squeeze=False, **layout)
    for ax in made.flat:
        ax.set_facecolor(PAPER)
        ax.set_prop_cycle(color=COLOURS)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(RULE)
        ax.tick_params(which="both", colors=MUTED, labelsize=8, length=3, width=0.8)
        ax.grid(True, color=LINE, linewidth=0.6)
        ax.set_axisbelow(True)
        ax.set_xlabel(x, color=INK, fontsize=9)
        ax.set_ylabel(y, color=INK, fontsize=9)
        ax.title.set(color=INK, fontsize=9)
    if rows * columns == 1:
        made[0, 0].set_title(title, loc="left", color=INK, fontsize=10)
        return made[0, 0]
    if title:
        figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=10)
    return made


def colour_map(signed: bool = False) -> Any:
    """Returns the matplotlib colour map of magnitudes, or with `signed` of values of both signs; NaN is grey."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("glass", BOTH_WAYS if signed else BLUES).with_extremes(bad=LINE)


def heat(
    ax: Any,
    values: Tensor | np.ndarray,
    *,
    label: str = "",
    signed: bool = False,
    low: float | None = None,
    high: float | None = None,
    bar: bool = True,
    **image: Any,
) -> Any:
    """Draws `values` (rows, columns) as colours, row 0 on top, with a colour bar, and returns the image. `signed`
    centres them at 0.

    The range is that of the finite values, from 0 if they are not negative, unless `low` and `high` are given."""
    shown = values.detach().float().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values, dtype=float)
    finite = shown[np.isfinite(shown)]
    high = high if high is not None else float(abs(finite).max() if signed else finite.max()) if finite.size else 1.0
    low = low if low is not None else -high if signed else min(0.0, float(finite.min())) if finite.size else 0.0
    drawn = ax.imshow(
        np.ma.masked_invalid(shown), cmap=colour_map(signed), vmin=low, vmax=high, **{"aspect": "auto"} | image
    )
    _finish(ax, drawn, label, bar)
    return drawn


def _finish(ax: Any, drawn: Any, label: str, bar: bool) -> None:
    ax.grid(False)
    ax.spines[:].set_visible(False)
    if bar:
        key = ax.figure.colorbar(drawn, ax=ax, fraction=0.046, pad=0.02)
        key.set_label(label, color=INK, fontsize=9)
        key.ax.tick_params(colors=MUTED, labelsize=8, length=2)
        key.outline.set_visible(False)


def mesh(ax: Any, x: Tensor, values: Tensor, *, label: str = "", bar: bool = True) -> Any:
    """Draws `values` (rows, columns) as colours, row 0 on top, columns at `x` along an axis of any scale."""
    signed, most = bool((values < 0).any()), float(values.abs().max())
    drawn = ax.pcolormesh(
        x.numpy(), range(len(values)), values.numpy(), cmap=colour_map(signed), vmin=-most if signed else 0, vmax=most,
        shading="nearest", rasterized=True,
    )  # fmt: skip
    ax.invert_yaxis()
    _finish(ax, drawn, label, bar)
    return drawn


def whole_ticks(ax: Any, which: str) -> None:
    """Sets the ticks of the "x" or "y" axis at integers only: layers, heads, positions."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.get_major_locator().set_params(integer=True)


def words(ax: Any, given: Sequence[str], which: str = "both") -> None:
    """Labels the ticks of the "x" axis, the "y" axis or "both" with tokens; of many tokens, every n-th."""
    step = -(-len(given) // MOST_WORDS)
    at = range(0, len(given), step)
    shown, size = [legible(given[i]) for i in at], 8 if len(at) <= 24 else 6
    if which != "y":
        ax.set_xticks(at, shown, rotation=60, ha="right", rotation_mode="anchor", fontsize=size)
    if which != "x":
        ax.set_yticks(at, shown, fontsize=size)


def legible(token: str, most: int = 14) -> str:
    """Returns a token's text as a label: with every space as a symbol, truncated if long, and without a `$` that would
    start a formula."""
    shown = visible(token).replace(" ", "␣").replace("␍", "⟨U+000D⟩")  # missing in the font of figures
    return (shown if len(shown) <= most else shown[: most - 1] + "…").replace("$", r"\$")


def legend(ax: Any, **given: Any) -> None:
    """Draws the legend of the plot, without a frame."""
    ax.legend(**{"frameon": False, "fontsize": 8, "labelcolor": INK} | given)


def line(ax: Any, at: float, said: str = "", along: str = "y") -> None:
    """Draws a dashed reference line at the value `at` of the "y" or "x" axis, with the label `said`."""
    draw = ax.axhline if along == "y" else ax.axvline
    draw(at, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
    behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
    if said and along == "y":
        ax.annotate(said, (1, at), xycoords=("axes fraction", "data"), xytext=(-2, 2), textcoords="offset points",
                    ha="right", va="bottom", fontsize=7.5, color=MUTED, bbox=behind)  # fmt: skip
    elif said:
        ax.annotate(said, (at, 1), xycoords=("data", "axes fraction"), xytext=(3, -2), textcoords="offset points",
                    ha="left", va="top", fontsize=7.5, color=MUTED, bbox=behind)  # fmt: skip
