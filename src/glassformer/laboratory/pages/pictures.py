"""Curves of measured claims as charts."""

from __future__ import annotations

import math
from itertools import zip_longest
from statistics import fmean

from glassformer.figures import Axis, Markup, Series, line_chart
from glassformer.laboratory.evidence.figure import MeanCurve, Picture

FEW = 8
"""Largest number of points of a curve with a tick each."""


def chart(picture: Picture, width: int = 560, height: int = 340) -> Markup:
    """Returns a measured claim's curves as an SVG chart: a thick line for the mean over seeds, a thin one for each
    seed."""
    series = [_series(one, style) for style, one in enumerate(picture.curves)]
    at = sorted({value for one in picture.curves for value in one.x})
    ticks = [(value, f"{value:g}") for value in at] if len(at) <= FEW else None
    values = [value for one in picture.curves for row in one.y for value in row if value > 0]
    x = Axis(picture.x, "log" if "x" in picture.log else "linear", ticks=ticks)
    y = Axis(picture.title, "log", ticks=_powers(values)) if "y" in picture.log else Axis(picture.title)
    return line_chart(series, x, y, f"{picture.title}, by {picture.x}", width, height)


def _powers(values: list[float]) -> list[tuple[float, str]] | None:
    """Returns axis ticks at the powers of ten in the range of the values; None if it holds fewer than two."""
    if not values:
        return None
    low, high = math.ceil(math.log10(min(values)) - 1e-9), math.floor(math.log10(max(values)) + 1e-9)
    step = max(1, -(-(high - low) // FEW))
    return [(10.0**n, f"{10.0**n:g}") for n in range(low, high + 1, step)] if high > low else None


def _series(one: MeanCurve, style: int) -> Series:
    rows = [list(zip(one.x, row, strict=False)) for row in one.y]
    if one.dots:
        return Series(one.label, (), style, markers=[point for row in rows for point in row])
    means = [fmean(value for value in at if value is not None) for at in zip_longest(*one.y)]
    mean = list(zip(one.x, means, strict=False))
    return Series(one.label, mean, style, thin=rows if len(rows) > 1 else ())
