"""Drawing of one measured value and its interval against a published value and the range that a claim gives, on a
separate axis."""

from __future__ import annotations

from .markup import Markup, join, number, tag
from .numbers import finite, nice_ticks, tick_labels, widen

_PAD = 16.0
_AXIS = 18


def against_row(
    value: float,
    low: float | None,
    high: float | None,
    published: float | None,
    least: float | None,
    most: float | None,
    title: str,
    width: int = 420,
    height: int = 26,
) -> Markup:
    """Draws a dot with a bar for the measured value and its interval, a diamond for the published value, and a band
    from `least` to `most` for the claimed range.

    A band with one end only extends to the edge of the drawing; the dot of a value without an interval is not
    filled."""
    known = [one for one in map(finite, (value, low, high, published, least, most)) if one is not None]
    left, right = widen(min(known), max(known))
    margin = (right - left) * 0.12
    left, right = left - margin, right + margin

    def at(x: float) -> float:
        return _PAD + (min(max(x, left), right) - left) / (right - left) * (width - 2 * _PAD)

    middle = height / 2
    pieces = []
    if least is not None or most is not None:
        a = _PAD if least is None else at(least)
        b = width - _PAD if most is None else at(most)
        pieces.append(tag("rect", x=a, y=3.0, width=max(b - a, 1.5), height=float(height - 6), class_="gf-claimed"))
    if low is not None and high is not None:
        left_end, right_end, m = number(at(low)), number(at(high)), number(middle)
        ends = f"M{left_end},{number(middle - 5)}v10M{right_end},{number(middle - 5)}v10"
        pieces.append(tag("path", d=f"M{left_end},{m}H{right_end}{ends}", class_="gf-interval"))
    if published is not None:
        x = at(published)
        pieces.append(tag("path", d=f"M{number(x)},{number(middle - 7)}l7,7l-7,7l-7,-7z", class_="gf-published"))
    pieces.append(
        tag("circle", cx=at(value), cy=middle, r=4.5, class_="gf-dot" if low is not None else "gf-dot gf-open")
    )
    ticks = nice_ticks(left, right, target=4)
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        pieces.append(tag("path", d=f"M{number(at(tick))},{height}v4", class_="gf-base"))
        pieces.append(tag("text", label, x=at(tick), y=float(height + 16), class_="gf-tick", text_anchor="middle"))
    return tag(
        "svg", join(pieces), class_="gf-intervals", viewBox=f"0 0 {width} {height + _AXIS}", width=width,
        height=height + _AXIS, role="img", aria_label=title,
    )  # fmt: skip
