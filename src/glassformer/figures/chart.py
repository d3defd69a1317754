"""Elements that charts share: axes, the frame with its grid, labels that do not overlap."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from .markup import Markup, clean, join, number, tag
from .numbers import finite, log_ticks, nice_ticks, tick_labels, widen

Point = tuple[float, float]
CHARACTER = 8.2  # pixels per letter of a label, rounded up
_FAR = 1e6


@dataclass(frozen=True)
class Axis:
    """Quantity, kind and limits of an axis; limits and ticks that are not given follow from the data.

    In a read-out, the values that hovering over the chart shows, `unit` is the word after a value, and `decimals` is
    the number of decimals of a value on y.
    """

    label: str
    kind: Literal["linear", "log"] = "linear"
    low: float | None = None
    high: float | None = None
    ticks: Sequence[tuple[float, str]] | None = None
    unit: str = ""
    decimals: int | None = None


@dataclass(frozen=True)
class Scale:
    """Function from values, `low` to `high`, to pixels, `start` to `end`; values far outside give finite pixels."""

    kind: Literal["linear", "log"]
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        low, length = self._ends
        share = (self._unit(value) - low) / length
        return min(max(self.start + share * (self.end - self.start), -_FAR), _FAR)

    @cached_property
    def _ends(self) -> tuple[float, float]:
        """Lower end, and length, of the scale in the unit of `_unit`."""
        low = self._unit(self.low)
        return low, self._unit(self.high) - low

    def _unit(self, value: float) -> float:
        """Returns the number that is linear in pixels: the value's logarithm on a log scale, otherwise half the value,
        so that no difference overflows."""
        return math.log10(max(value, 1e-300)) if self.kind == "log" else value / 2


@dataclass(frozen=True)
class Frame:
    """Rectangle of a chart's data area in pixels, with the scales of both axes."""

    width: int
    height: int
    left: float
    top: float
    right: float
    bottom: float
    x: Scale
    y: Scale

    def at(self, point: Point) -> Point:
        """Returns the place (x, y) of a data point in pixels."""
        return self.x(point[0]), self.y(point[1])


def usable(points: Iterable[Sequence[float]], x: Axis) -> list[Point]:
    """Returns the points that the x axis can show, sorted by x: finite ones, with positive x if the axis is
    logarithmic."""
    pairs = ((finite(p[0]), finite(p[1])) for p in points if len(p) == 2)
    kept = [(a, b) for a, b in pairs if a is not None and b is not None and (x.kind == "linear" or a > 0)]
    return sorted(kept, key=lambda point: point[0])


def make_frame(
    size: tuple[int, int],
    margins: tuple[float, float, float, float],
    x: Axis,
    y: Axis,
    points: Sequence[Point],
) -> Frame:
    """Returns the frame of a chart of `size` (width, height) in pixels for these points; margins are left, top, right,
    bottom."""
    width, height = size
    left, top, right, bottom = margins
    scale_x = _scale(x, [p[0] for p in points], left, width - right, margin=0.0)
    scale_y = _scale(y, [p[1] for p in points], height - bottom, top, margin=0.05)
    return Frame(width, height, left, top, width - right, height - bottom, scale_x, scale_y)


def _scale(axis: Axis, values: Sequence[float], start: float, end: float, margin: float) -> Scale:
    """Returns the scale of an axis from pixel `start` to `end`: over its limits, or over the range of the values, to
    which a linear axis adds `margin`, a share of that range, at each end."""
    low = axis.low if axis.low is not None else min(values, default=1.0)
    high = axis.high if axis.high is not None else max(values, default=2.0)
    if axis.kind == "log":
        low = max(low, 1e-290)
        high = max(high, low)
        if high / low < 1 + 1e-9:
            low, high = low / 1.5, high * 1.5
        return Scale("log", low, high, start, end)
    low, high = widen(low, high)
    pad = (high / 2 - low / 2) * 2 * margin
    low, high = (low if axis.low is not None else low - pad), (high if axis.high is not None else high + pad)
    return Scale("linear", low, high, start, end)


def axis_ticks(axis: Axis, scale: Scale, target: int) -> list[tuple[float, str]]:
    """Returns (value, label) of the ticks that the axis has set, or of about `target` round values."""
    if axis.ticks is not None:
        return [(value, label) for value, label in axis.ticks if scale.low <= value <= scale.high]
    values = (log_ticks if scale.kind == "log" else nice_ticks)(scale.low, scale.high, target)
    return list(zip(values, tick_labels(values), strict=True))


def scaffold(frame: Frame, x: Axis, y: Axis) -> Markup:
    """Draws the grid lines, ticks, and horizontal labels of both axes."""
    across = max(3, int((frame.right - frame.left) / 95))
    pieces = [tag("text", y.label, x=0.0, y=13.0, class_="gf-axis")]
    for value, label in axis_ticks(y, frame.y, max(3, int((frame.bottom - frame.top) / 48))):
        level = frame.y(value)
        pieces.append(tag("path", d=f"M{number(frame.left)},{number(level)}H{number(frame.right)}", class_="gf-grid"))
        pieces.append(tag("text", label, x=frame.left - 8, y=level + 4, class_="gf-tick", text_anchor="end"))
    base = number(frame.bottom)
    pieces.append(tag("path", d=f"M{number(frame.left)},{base}H{number(frame.right)}", class_="gf-base"))
    for value, label in axis_ticks(x, frame.x, across):
        place = frame.x(value)
        pieces.append(tag("path", d=f"M{number(place)},{base}v5", class_="gf-base"))
        pieces.append(tag("text", label, x=place, y=frame.bottom + 19, class_="gf-tick", text_anchor="middle"))
    middle = (frame.left + frame.right) / 2
    pieces.append(tag("text", x.label, x=middle, y=frame.height - 6.0, class_="gf-axis", text_anchor="middle"))
    return join(pieces)


def clipped(frame: Frame, *children: object) -> Markup:
    """Returns an element with `children` in the chart's coordinates, clipped at the frame (an inner <svg> clips without
    an id)."""
    pad = 7.0
    left, top = frame.left - pad, frame.top - pad
    width, height = frame.right - frame.left + 2 * pad, frame.bottom - frame.top + 2 * pad
    box = " ".join(number(v) for v in (left, top, width, height))
    return tag("svg", *children, x=left, y=top, width=width, height=height, viewBox=box, class_="gf-clip")


def drawing(frame: Frame, x: Axis, y: Axis, title: str, *children: object, readable: bool = False) -> Markup:
    """Returns the whole chart as an <svg>, with `title` for screen readers; if `readable`, it carries the data with
    which the page's script shows values on hover."""
    data = json.dumps(_reading(frame, x, y), separators=(",", ":"), allow_nan=False) if readable else None
    return tag(
        "svg",
        scaffold(frame, x, y),
        *children,
        class_="gf-chart",
        viewBox=f"0 0 {frame.width} {frame.height}",
        role="img",
        aria_label=title,
        data_frame=data,
    )


def _reading(frame: Frame, x: Axis, y: Axis) -> dict[str, object]:
    """Returns the data with which the page's script converts pixels to values: the frame's edges, and kind, limits and
    unit of each axis."""
    return {
        "left": frame.left, "right": frame.right, "top": frame.top, "bottom": frame.bottom,
        "x": {"log": frame.x.kind == "log", "low": frame.x.low, "high": frame.x.high, "unit": clean(x.unit)},
        "y": {"log": frame.y.kind == "log", "low": frame.y.low, "high": frame.y.high, "unit": clean(y.unit),
              "decimals": 3 if y.decimals is None else y.decimals},
    }  # fmt: skip


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Returns the places in their given order, moved as little as needed until neighbours are at least `gap` apart,
    inside [low, high] if possible."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    clusters: list[tuple[list[int], float]] = []
    for index in order:
        members, middle = [index], min(max(places[index], low), high)
        while (
            clusters and middle - (len(members) - 1) * gap / 2 < clusters[-1][1] + (len(clusters[-1][0]) + 1) * gap / 2
        ):
            before, centre = clusters.pop()
            middle = (centre * len(before) + middle * len(members)) / (len(before) + len(members))
            members = before + members
            half = (len(members) - 1) * gap / 2
            middle = max(min(middle, high - half), low + half)
        clusters.append((members, middle))
    result = [0.0] * len(places)
    for members, middle in clusters:
        for rank, index in enumerate(members):
            result[index] = middle + (rank - (len(members) - 1) / 2) * gap
    return result


def shorten(label: str, limit: int = 26) -> str:
    """Returns a label of at most `limit` characters, shortened in the middle because names differ at their ends."""
    label = clean(label)
    return label if len(label) <= limit else f"{label[: limit // 2]}…{label[-(limit - limit // 2 - 1) :]}"
