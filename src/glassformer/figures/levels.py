"""Drawings of levels with intervals: one small SVG per table row, all on one scale that need not include zero."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .markup import Markup, join, number, tag
from .numbers import finite, nice_ticks, tick_labels, widen

Domain = tuple[float, float]
_PAD = 12.0
_MARGIN = 0.06


def level_domain(values: Iterable[float | None]) -> Domain:
    """Returns the ends of a range that contains every value that is not None, with a small margin at each end."""
    known = [value for value in map(finite, values) if value is not None]
    low, high = widen(min(known, default=0.0), max(known, default=1.0))
    room = (high - low) * _MARGIN
    return low - room, high + room


def _place(value: float, domain: Domain, width: float) -> float:
    """Returns the x coordinate of a value in pixels, clipped to the drawing."""
    share = min(max((value - domain[0]) / (domain[1] - domain[0]), 0.0), 1.0)
    return _PAD + share * (width - 2 * _PAD)


def level_row(value: float, low: float | None, high: float | None, runs: Sequence[float], domain: Domain, title: str,
              width: int = 220, height: int = 30) -> Markup:  # fmt: skip
    """Draws one level: a dot for the mean `value`, its interval from `low` to `high` as a bar, and a short vertical
    line for the value of each run in `runs`."""
    middle = height / 2
    pieces = []
    for run in runs:
        x = number(_place(run, domain, width))
        pieces.append(tag("path", d=f"M{x},{number(middle - 9)}v18", class_="gf-zero"))
    if low is not None and high is not None:
        a, b = (number(_place(end, domain, width)) for end in (low, high))
        ends = f"M{a},{number(middle - 5)}v10M{b},{number(middle - 5)}v10"
        pieces.append(tag("path", d=f"M{a},{number(middle)}H{b}{ends}", class_="gf-interval"))
    pieces.append(tag("circle", cx=_place(value, domain, width), cy=middle, r=4.5, class_="gf-dot"))
    return tag(
        "svg", join(pieces), class_="gf-intervals", viewBox=f"0 0 {width} {height}", width=width, height=height,
        role="img", aria_label=title,
    )  # fmt: skip


def level_axis(domain: Domain, width: int = 220, height: int = 22) -> Markup:
    """Draws the common axis of drawings by `level_row`: ticks with their values."""
    ticks = nice_ticks(*domain, target=3)
    pieces = []
    for value, label in zip(ticks, tick_labels(ticks), strict=True):
        place = _place(value, domain, width)
        pieces.append(tag("path", d=f"M{number(place)},0v4", class_="gf-base"))
        pieces.append(tag("text", label, x=place, y=17.0, class_="gf-tick", text_anchor="middle"))
    return tag(
        "svg", join(pieces), class_="gf-intervals", viewBox=f"0 0 {width} {height}", width=width, height=height,
        aria_hidden="true",
    )  # fmt: skip
