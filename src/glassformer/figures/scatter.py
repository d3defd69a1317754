"""Scatter chart of two quantities for every arm, with the range over seeds as whiskers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .chart import CHARACTER, Axis, Frame, drawing, make_frame, shorten
from .markup import Markup, number, tag
from .numbers import finite
from .style import colour, marker

Range = tuple[float, float]
Rectangle = tuple[float, float, float, float]
_LINE = 16.0
NEAR = 20.0  # pixels; a name within this distance of its marker needs no line


@dataclass(frozen=True)
class Dot:
    """One arm of a scatter chart at (x, y); `x_range` and `y_range` are the lowest and highest value over seeds, None
    for one seed."""

    label: str
    x: float
    y: float
    style: int = 0
    x_range: Range | None = None
    y_range: Range | None = None
    title: str = ""


def scatter_chart(dots: Sequence[Dot], x: Axis, y: Axis, title: str, width: int = 1040, height: int = 400,
                  hint: str = "", names: bool = True) -> Markup:  # fmt: skip
    """Draws the arms as markers with names; `hint` names the better direction: "↘ faster and better".

    Without names (narrow screens) a legend has to name the markers."""
    shown = [dot for dot in dots if finite(dot.x) is not None and finite(dot.y) is not None]
    if not shown:
        return tag("p", "Nothing was recorded that could be drawn here.", class_="gf-empty")
    frame = make_frame((width, height), (58.0, 30.0, 24.0, 50.0), _roomy(x, shown), y, _corners(shown))
    marks = [_mark(frame, dot) for dot in shown]
    return drawing(frame, x, y, title, _hint(frame, hint) if hint else None, *marks,
                   *(_names(frame, shown) if names else ()))  # fmt: skip


def _roomy(axis: Axis, dots: Sequence[Dot]) -> Axis:
    """Returns the x axis `axis` with limits beyond the dots, so that names fit at each end."""
    values = [v for dot in dots for v in (dot.x, *(dot.x_range or ()))]
    low, high = min(values), max(values)
    pad = (high - low) * 0.14 or abs(high) * 0.1 or 1.0
    floor = 0.0 if low >= 0 else low - pad
    return Axis(axis.label, axis.kind, max(low - pad, floor), high + pad, axis.ticks, axis.unit, axis.decimals)


def _corners(dots: Sequence[Dot]) -> list[tuple[float, float]]:
    """Returns data points whose range the frame must cover: markers and the ends of their whiskers."""
    return [(x, y) for d in dots for x in (d.x, *(d.x_range or ())) for y in (d.y, *(d.y_range or ()))]


def _mark(frame: Frame, dot: Dot) -> Markup:
    """Draws the marker of an arm with its whiskers."""
    px, py = frame.at((dot.x, dot.y))
    whiskers = []
    if dot.x_range:
        whiskers.append(f"M{number(frame.x(dot.x_range[0]))},{number(py)}H{number(frame.x(dot.x_range[1]))}")
    if dot.y_range:
        whiskers.append(f"M{number(px)},{number(frame.y(dot.y_range[0]))}V{number(frame.y(dot.y_range[1]))}")
    lines = tag("path", d="".join(whiskers), class_="gf-whisker") if whiskers else None
    title = dot.title or dot.label
    return tag("g", lines, marker(dot.style, px, py, 6.0, title), class_=f"gf-series {colour(dot.style)}")


def _names(frame: Frame, dots: Sequence[Dot]) -> list[Markup]:
    """Draws the name of each arm near its marker, at the first of many places without overlap; a line leads to a
    distant name."""
    taken = [box for dot in dots for box in _covered(frame, dot)]
    pieces = []
    for dot in dots:
        at, label = frame.at((dot.x, dot.y)), shorten(dot.label)
        x, y, anchor, box = _free_place(frame, at, len(label) * CHARACTER, taken)
        taken.append(box)
        leader = _leader(at, box)
        pieces.append(tag(
            "g", tag("path", d=leader, class_="gf-leader") if leader else None,
            tag("text", label, x=x, y=y, text_anchor=anchor, class_="gf-name"), class_=colour(dot.style),
        ))  # fmt: skip
    return pieces


def _leader(at: tuple[float, float], box: Rectangle) -> str | None:
    """Returns the outline (`d` of a <path>) of a line from a marker to the nearest edge of its name; None if the name
    is close to the marker."""
    px, py = at
    x, y = min(max(px, box[0]), box[2]), min(max(py, box[1]), box[3])
    return None if math.hypot(x - px, y - py) < NEAR else f"M{number(px)},{number(py)}L{number(x)},{number(y)}"


def _covered(frame: Frame, dot: Dot) -> list[Rectangle]:
    """Returns the rectangles, in pixels, that a marker and its whiskers cover."""
    px, py = frame.at((dot.x, dot.y))
    boxes = [(px - 8, py - 8, px + 8, py + 8)]
    if dot.x_range:
        boxes.append((frame.x(dot.x_range[0]), py - 3, frame.x(dot.x_range[1]), py + 3))
    if dot.y_range:
        boxes.append((px - 3, frame.y(dot.y_range[1]), px + 3, frame.y(dot.y_range[0])))
    return boxes


def _free_place(
    frame: Frame, at: tuple[float, float], length: float, taken: Sequence[Rectangle]
) -> tuple[float, float, str, Rectangle]:
    """Returns (x, y, text-anchor, rectangle) of the first place for a name of `length` pixels near `at` that overlaps
    nothing `taken`: right, left, above, below, then on ever wider rings.

    If every place overlaps, returns the place inside the chart whose overlap is smallest."""
    px, py = at
    tries = [(px + 12, py + 4, "start"), (px - 12, py + 4, "end")]
    tries += [(px + dx, py + dy, "start" if dx > 0 else "end") for dy in (-9, 17) for dx in (9, -9)]
    tries += [(px, py - 12, "middle"), (px, py + 20, "middle")]
    for ring in range(2, 22):
        reach = ring * _LINE / 2
        for turn in range(12):
            dx, dy = math.cos(turn * math.pi / 6) * 1.6 * reach, math.sin(turn * math.pi / 6) * reach
            tries.append((px + dx, py + 4 + dy, "start" if dx > 1 else "end" if dx < -1 else "middle"))
    best = None
    for x, y, anchor in tries:
        left = x - {"start": 0.0, "end": length, "middle": length / 2}[anchor]
        box = (left, y - 12, left + length, y + 4)
        if not (box[0] >= frame.left - 4 and box[2] <= frame.width and box[1] >= 18 and box[3] <= frame.bottom):
            continue
        covered = sum(_overlap(box, other) for other in taken)
        if covered == 0:
            return x, y, anchor, box
        if best is None or covered < best[0]:
            best = (covered, (x, y, anchor, box))
    x, y, anchor = tries[0]
    return best[1] if best else (x, y, anchor, (x, y - 12, x + length, y + 4))


def _overlap(a: Rectangle, b: Rectangle) -> float:
    """Returns the area in square pixels that two rectangles share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _hint(frame: Frame, words: str) -> Markup:
    """Draws the text above the chart that names the better direction."""
    return tag("text", words, x=frame.right, y=13.0, text_anchor="end", class_="gf-hint")
