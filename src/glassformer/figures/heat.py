"""Heat maps: values over rows and columns as colours of one scale, which several maps share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .chart import Axis, Scale, axis_ticks, spread
from .markup import Markup, join, number, tag
from .numbers import finite, log_ticks, nice_ticks, si, tick_labels, widen
from .style import marker

LEVELS = 32  # number of colours of the scale; the style sheet has them as --gf-h0 to --gf-h31
MOST_COLUMNS, MOST_ROWS = 120, 64
NOT_FINITE = ("nan", "inf", "-inf")
_LEFT, _TOP, _RIGHT, _BOTTOM = 34.0, 34.0, 10.0, 46.0
_HEIGHT = 150.0  # height of the cells of a map, for any number of rows
_LINE = 18.0  # distance between the names of rows, which a narrow screen draws larger


@dataclass(frozen=True)
class HeatScale:
    """Quantity and range of a heat map's colours. A value beyond an end has the colour of that end; `below` and `above`
    are True if the data has values beyond `low` and `high`."""

    label: str
    low: float
    high: float
    kind: Literal["linear", "log"] = "linear"
    below: bool = False
    above: bool = False

    def level(self, value: float) -> int:
        """Returns the number of a value's colour, 0 to LEVELS - 1."""
        return min(LEVELS - 1, max(0, int(Scale(self.kind, self.low, self.high, 0.0, LEVELS)(value))))


@dataclass(frozen=True)
class HeatColumn:
    """Values of a heat map over one interval of the x axis, the bottom row first; `name` describes the interval.

    A value of None was not recorded; nan and infinities, as numbers or as words, are drawn as not finite.
    """

    start: float
    end: float
    values: Sequence[object]
    name: str = ""


@dataclass(frozen=True)
class Mark:
    """An event at x, drawn above the heat map as the marker of the style number `shape` (`style.marker`)."""

    x: float
    shape: int
    title: str


def heat_scale(label: str, values: Iterable[object], kind: Literal["linear", "log"] = "linear",
               low: float | None = None, high: float | None = None,
               every: Iterable[object] | None = None) -> HeatScale:  # fmt: skip
    """Returns the scale over the range of `values`; a linear one has the ends `low` and `high` if they are given.
    `every` holds all values to be drawn, some perhaps outside of the scale; by default `values`.

    A logarithmic scale ignores `low` and `high`, includes values of `every` up to one power of ten beyond `values`, and
    spans at most six powers of ten.
    """
    known = [v for value in values if (v := finite(value)) is not None]
    drawn = known if every is None else [v for value in every if (v := finite(value)) is not None]
    if kind == "log":
        low, high = _decades([v for v in known if v > 0] or [0.1, 1.0], [v for v in drawn if v > 0])
    else:
        low = min(known, default=0.0) if low is None else low
        low, high = widen(low, max(known, default=low + 1) if high is None else high)
    return HeatScale(label, low, high, kind, any(v < low for v in drawn), any(v > high for v in drawn))


def _decades(known: Sequence[float], drawn: Sequence[float]) -> tuple[float, float]:
    """Returns the ends of a logarithmic scale over the positive values `known`; values in `drawn` widen it by at most
    ten times at each end, and it spans at most six powers of ten."""
    low, high = max(min(known), 1e-280), min(max(known), 1e280)
    low, high = max(min(drawn, default=low), low / 10), min(max(drawn, default=high), high * 10)
    low = max(low, high / 1e6)
    return (low, high) if high / low > 1 + 1e-9 else (low / 1.5, low * 1.5)


def is_not_finite(value: object) -> bool:
    """Returns True if a value is nan or an infinity, as a number or as a word."""
    return value in NOT_FINITE if isinstance(value, str) else isinstance(value, float) and not math.isfinite(value)


def heat_map(columns: Sequence[HeatColumn], rows: Sequence[str], scale: HeatScale, x: Axis, title: str, y: str = "",
             marks: Sequence[Mark] = (), width: int = 500) -> Markup:  # fmt: skip
    """Draws the columns as one SVG, with the marks above; `rows` holds the rows' names from the bottom, and hovering
    over a cell shows its value.

    Only the first MOST_COLUMNS x MOST_ROWS cells are drawn: a caller with more cells has to average them first.
    """
    columns = [c for c in columns if None not in (finite(c.start), finite(c.end))][:MOST_COLUMNS]
    rows = rows[:MOST_ROWS]
    marks = [mark for mark in marks if finite(mark.x) is not None]
    known = [end for column in columns for end in (column.start, column.end)]
    if not known or not rows:
        return tag("p", "Nothing was recorded that could be drawn here.", class_="gf-empty")
    low, high = widen(min(known) if x.low is None else x.low, max(known) if x.high is None else x.high)
    across = Scale("linear", low, high, _LEFT, width - _RIGHT)
    height = _TOP + _HEIGHT + _BOTTOM
    return tag(
        "svg", _words(across, x, y, rows, width, height),
        *(_column(column, across, rows, scale, y) for column in columns),
        _marks(across, marks),
        class_="gf-chart gf-heat", viewBox=f"0 0 {width} {number(height)}", role="img", aria_label=title,
    )  # fmt: skip


def _edges(row: int, rows: int) -> tuple[float, float]:
    """Returns the upper and lower edge in pixels of row `row`, counted from the bottom of `rows` rows, with a gap to
    its neighbours if there is room."""
    share = _HEIGHT / rows
    gap = 1.0 if share > 5 else 0.0
    return _TOP + _HEIGHT - (row + 1) * share + gap, _TOP + _HEIGHT - row * share


def _column(column: HeatColumn, across: Scale, rows: Sequence[str], scale: HeatScale, y: str) -> Markup:
    """Draws the cells of one column; `across` is the scale of the x axis, `y` the word for a row in the text on
    hover."""
    left, right = sorted((across(column.start), across(column.end)))
    return join(
        _cell(left, right, *_edges(i, len(rows)), value, f"{y} {name}, {column.name}".strip(" ,"), scale)
        for i, (name, value) in enumerate(zip(rows, column.values, strict=False))
    )


def _cell(left: float, right: float, top: float, bottom: float, value: object, name: str, scale: HeatScale) -> Markup:
    """Draws the cell of one value, a rectangle with these edges in pixels, whose text on hover gives `name`; a thin
    line crosses the cell of a value that was not recorded."""
    box = f"M{number(left)},{number(top)}H{number(right)}V{number(bottom)}H{number(left)}z"
    known = finite(value)
    if known is not None:
        return tag("path", tag("title", f"{name}: {si(known)}"), d=box, class_=f"gf-h{scale.level(known)}")
    if is_not_finite(value):
        return tag("path", tag("title", f"{name}: {value}, not finite"), d=box, class_="gf-hx")
    slash = f"M{number(left)},{number(bottom)}L{number(right)},{number(top)}"
    return tag("path", tag("title", f"{name}: not recorded"), d=box + slash, class_="gf-hn")


def _marks(across: Scale, marks: Sequence[Mark]) -> Markup:
    """Draws the events above the map, moved apart as little as needed to be distinguishable."""
    places = spread([across(mark.x) for mark in marks], 8.0, across.start, across.end)
    drawn = [marker(mark.shape, x, _TOP - 7, 3.4, mark.title) for mark, x in zip(marks, places, strict=True)]
    return tag("g", *drawn, class_="gf-event")


def _words(across: Scale, x: Axis, y: str, rows: Sequence[str], width: int, height: float) -> Markup:
    """Draws the names of the rows, the ticks and the labels of both axes; only some names if space is short."""
    pieces = [tag("text", y, x=0.0, y=13.0, class_="gf-axis")] if y else []
    stride = math.ceil(len(rows) * _LINE / _HEIGHT)
    for i in range(0, len(rows), stride):
        middle = sum(_edges(i, len(rows))) / 2
        pieces.append(tag("text", rows[i], x=_LEFT - 7, y=middle + 4, class_="gf-tick", text_anchor="end"))
    base = _TOP + _HEIGHT + 1
    pieces.append(tag("path", d=f"M{number(_LEFT)},{number(base)}H{number(across.end)}", class_="gf-base"))
    for value, label in axis_ticks(x, across, max(3, int(width / 95))):
        place = across(value)
        pieces.append(tag("path", d=f"M{number(place)},{number(base)}v5", class_="gf-base"))
        anchor = "end" if place > across.end - 10 else "middle"
        pieces.append(tag("text", label, x=place, y=base + 19, class_="gf-tick", text_anchor=anchor))
    middle = (across.start + across.end) / 2
    pieces.append(tag("text", x.label, x=middle, y=height - 4.0, class_="gf-axis", text_anchor="middle"))
    return join(pieces)


def heat_legend(scale: HeatScale, missing: bool = False, not_finite: bool = False, width: int = 340) -> Markup:
    """Draws the scale's colours with their values, and a sample of a missing cell if `missing`, of a non-finite one if
    `not_finite`."""
    step = (width - 20) / LEVELS
    wide = number(step + 0.4)  # a little overlap, so that no seam shows
    pieces = [tag("path", d=f"M{number(10 + i * step)},0h{wide}v12h-{wide}z", class_=f"gf-h{i}") for i in range(LEVELS)]
    along = Scale(scale.kind, scale.low, scale.high, 10.0, width - 10.0)
    for value, label in _legend_ticks(scale):
        pieces.append(tag("path", d=f"M{number(along(value))},12v4", class_="gf-base"))
        pieces.append(tag("text", label, x=along(value), y=29.0, class_="gf-tick", text_anchor="middle"))
    low, high = _ends(scale)
    words = f"Colours: {scale.label}, {low} to {high}"
    bar = tag("svg", *pieces, class_="gf-heat gf-heat-bar", viewBox=f"0 0 {width} 34", width=width, height=34,
              role="img", aria_label=words)  # fmt: skip
    keys = [_key(name, shown) for name, shown, there in (("gf-hn", "not recorded", missing),
                                                         ("gf-hx", "not finite", not_finite)) if there]  # fmt: skip
    return tag("div", tag("span", scale.label, class_="gf-heat-label"), bar, *keys, class_="gf-heat-legend")


def _ends(scale: HeatScale) -> tuple[str, str]:
    """Returns both ends of the scale as text, with ≤ or ≥ if the data has values beyond the end."""
    return f"{'≤ ' if scale.below else ''}{si(scale.low)}", f"{'≥ ' if scale.above else ''}{si(scale.high)}"


def _legend_ticks(scale: HeatScale) -> list[tuple[float, str]]:
    """Returns (value, label) of the ticks: round values inside the scale, and each end beyond which the data has
    values."""
    values = (log_ticks if scale.kind == "log" else nice_ticks)(scale.low, scale.high, 5)
    share = Scale(scale.kind, scale.low, scale.high, 0.0, 1.0)
    low, high = _ends(scale)
    ends = [(end, words) for end, words, beyond in ((scale.low, low, scale.below), (scale.high, high, scale.above))
            if beyond]  # fmt: skip
    inside = [(value, words) for value, words in zip(values, tick_labels(values), strict=True)
              if all(abs(share(value) - share(end)) > 0.13 for end, _ in ends)]  # fmt: skip
    return [*inside, *ends]


def _key(kind: str, words: str) -> Markup:
    """Returns a sample cell in the style of the CSS class `kind`, followed by its meaning `words`."""
    slash = "M0,12L18,0" if kind == "gf-hn" else ""
    cell = tag("path", d=f"M0,0H18V12H0z{slash}", class_=kind)
    box = tag("svg", cell, class_="gf-heat", viewBox="0 0 18 12", width=18, height=12, aria_hidden="true")
    return tag("span", box, words, class_="gf-heat-key")
