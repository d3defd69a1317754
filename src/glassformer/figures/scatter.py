"""Two figures of every arm against each other, with the range over seeds as whiskers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .chart import CHARACTER, Axis, Frame, drawing, make_frame, shorten
from .markup import Markup, join, number, tag
from .numbers import finite
from .style import colour, marker

Range = tuple[float, float]
Rectangle = tuple[float, float, float, float]
_LINE = 16.0


@dataclass(frozen=True)
class Dot:
    """One arm at (x, y); the ranges are its lowest and highest value over seeds."""

    label: str
    x: float
    y: float
    style: int = 0
    x_range: Range | None = None
    y_range: Range | None = None
    title: str = ""


def scatter_chart(dots: Sequence[Dot], x: Axis, y: Axis, title: str, width: int = 1040, height: int = 400,
                  corner: tuple[str, str] | None = None) -> Markup:  # fmt: skip
    """The arms as named markers; `corner` says where better lies: ("bottom right", "faster and better")."""
    shown = [dot for dot in dots if finite(dot.x) is not None and finite(dot.y) is not None]
    if not shown:
        return tag("p", "Nothing was recorded that could be drawn here.", class_="gf-empty")
    frame = make_frame((width, height), (58.0, 30.0, 24.0, 50.0), _roomy(x, shown), y, _corners(shown))
    marks = [_mark(frame, dot) for dot in shown]
    return drawing(frame, x, y, title, _corner(frame, corner), *marks, *_names(frame, shown))


def _roomy(axis: Axis, dots: Sequence[Dot]) -> Axis:
    """The x axis with room at both sides, so that names have a place."""
    values = [v for dot in dots for v in (dot.x, *(dot.x_range or ()))]
    low, high = min(values), max(values)
    pad = (high - low) * 0.14 or abs(high) * 0.1 or 1.0
    floor = 0.0 if low >= 0 else low - pad
    return Axis(axis.label, axis.kind, max(low - pad, floor), high + pad, axis.ticks, axis.unit, axis.decimals)


def _corners(dots: Sequence[Dot]) -> list[tuple[float, float]]:
    """Every point that must lie inside the frame."""
    return [(x, y) for d in dots for x in (d.x, *(d.x_range or ())) for y in (d.y, *(d.y_range or ()))]


def _mark(frame: Frame, dot: Dot) -> Markup:
    """A marker with its whiskers."""
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
    """Each name beside its marker, at the first of a few places where it covers nothing."""
    taken = [box for dot in dots for box in _covered(frame, dot)]
    names = []
    for dot in dots:
        label = shorten(dot.label)
        x, y, anchor, box = _free_place(frame, frame.at((dot.x, dot.y)), len(label) * CHARACTER, taken)
        taken.append(box)
        names.append(tag("text", label, x=x, y=y, text_anchor=anchor, class_=f"gf-name {colour(dot.style)}"))
    return names


def _covered(frame: Frame, dot: Dot) -> list[Rectangle]:
    """What a marker and its whiskers cover."""
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
    """Right, left, above, below, then ever further above: the first place where the name fits."""
    px, py = at
    tries: list[tuple[float, float, str]] = [(px + 12, py + 4, "start"), (px - 12, py + 4, "end")]
    tries += [
        (px + 9, py - 9, "start"),
        (px - 9, py - 9, "end"),
        (px + 9, py + 17, "start"),
        (px - 9, py + 17, "end"),
    ]
    for rank in range(1, 8):
        tries += [(px, py - 12 - _LINE * (rank - 1), "middle"), (px, py + 20 + _LINE * (rank - 1), "middle")]
    best = None
    for x, y, anchor in tries:
        left = x - {"start": 0.0, "end": length, "middle": length / 2}[anchor]
        box = (left, y - 12, left + length, y + 4)
        inside = box[0] >= frame.left - 4 and box[2] <= frame.width and box[1] >= 14 and box[3] <= frame.bottom
        free = not any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken)
        best = best or (x, y, anchor, box)
        if inside and free:
            return x, y, anchor, box
    assert best is not None
    return best


def _corner(frame: Frame, corner: tuple[str, str] | None) -> Markup:
    """The quiet words that say in which corner a reader would like to be."""
    if corner is None:
        return Markup("")
    place, words = corner
    right, bottom = "right" in place, "bottom" in place
    x, y = frame.right - 4 if right else frame.left + 8, frame.bottom - 10 if bottom else frame.top + 8
    return join([tag("text", words, x=x, y=y, text_anchor="end" if right else "start", class_="gf-hint")])
