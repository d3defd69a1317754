"""Drawings of differences with intervals around zero: one small SVG per table row, all on one scale."""

from __future__ import annotations

from collections.abc import Iterable

from .markup import Markup, join, number, tag
from .numbers import finite, nice_ticks, tick_labels

Domain = tuple[float, float]
_PAD = 12.0


def interval_domain(values: Iterable[float | None]) -> Domain:
    """Returns the ends of a range symmetric around zero that contains every value that is not None, with a margin."""
    reach = max((abs(v) for v in map(finite, values) if v is not None), default=0.0) * 1.12
    return (-reach, reach) if reach > 1e-290 else (-1.0, 1.0)


def _place(value: float, domain: Domain, width: float) -> float:
    """Returns the x coordinate of a value in pixels, clipped to the drawing."""
    share = min(max((value / domain[1] + 1) / 2, 0.0), 1.0)
    return _PAD + share * (width - 2 * _PAD)


def interval_row(difference: float, low: float | None, high: float | None, domain: Domain, title: str,
                 decided: bool = True, width: int = 300, height: int = 30,
                 margin: float | None = None) -> Markup:  # fmt: skip
    """Draws one difference: a dot, its interval from `low` to `high` as a bar, and the line of zero. `decided` fills
    the dot; a band from -`margin` to `margin` shows the differences that count as equivalence, if `margin` is given."""
    middle, zero = height / 2, _place(0.0, domain, width)
    pieces = [tag("path", d=f"M{number(zero)},0V{height}", class_="gf-zero")]
    if margin:
        left, right = _place(-margin, domain, width), _place(margin, domain, width)
        pieces.insert(0, tag("rect", x=left, y=0, width=right - left, height=height, class_="gf-margin"))
    if low is not None and high is not None:
        a, b = _place(low, domain, width), _place(high, domain, width)
        m = number(middle)
        ends = f"M{number(a)},{number(middle - 5)}v10M{number(b)},{number(middle - 5)}v10"
        pieces.append(tag("path", d=f"M{number(a)},{m}H{number(b)}{ends}", class_="gf-interval"))
    dot = _place(difference, domain, width)
    pieces.append(tag("circle", cx=dot, cy=middle, r=4.5, class_="gf-dot" if decided else "gf-dot gf-open"))
    return tag(
        "svg",
        *pieces,
        class_="gf-intervals",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        aria_label=title,
    )


def interval_axis(domain: Domain, width: int = 300, height: int = 22) -> Markup:
    """Draws the common axis of drawings by `interval_row`: ticks with their signed values."""
    ticks = nice_ticks(*domain, target=4)
    pieces = []
    for value, label in zip(ticks, tick_labels(ticks), strict=True):
        place = _place(value, domain, width)
        pieces.append(tag("path", d=f"M{number(place)},0v4", class_="gf-base"))
        sign = "+" if value > 0 else ""
        pieces.append(tag("text", sign + label, x=place, y=17.0, class_="gf-tick", text_anchor="middle"))
    return tag(
        "svg",
        join(pieces),
        class_="gf-intervals",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        aria_hidden="true",
    )
