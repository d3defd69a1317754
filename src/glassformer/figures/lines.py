"""Line charts: a thick line per arm, a thin one per seed, markers for other measurements, names at the ends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .chart import CHARACTER, Axis, Frame, Point, clipped, drawing, make_frame, shorten, spread, usable
from .markup import Markup, breakable, join, number, path, tag
from .numbers import fixed, si
from .style import colour, dash, marker, swatch

MERGED = 24.0  # pixels; marks of values beyond the axis that are closer are merged
EARLY = 60.0  # pixels; a line that ends at a larger distance from the frame is named at its end


@dataclass(frozen=True)
class Series:
    """One arm of a line chart: `points` are the thick line, `thin` one line per seed, `markers` measurements of another
    kind.

    `ended` gives the reason for an early end (drawn as a cross); `note` is added to the legend; `dots` draws a marker
    at every point of the line; `stray` ignores the line in choosing the range of the y axis. If the y axis has an upper
    limit, a mark at the edge gives the highest value beyond it.
    """

    label: str
    points: Sequence[Point]
    style: int = 0
    thin: Sequence[Sequence[Point]] = field(default_factory=tuple)
    markers: Sequence[Point] = field(default_factory=tuple)
    ended: str = ""
    note: str = ""
    dots: bool = False
    stray: bool = False


def line_chart(series: Sequence[Series], x: Axis, y: Axis, title: str, width: int = 1040, height: int = 430,
               end_labels: bool = True) -> Markup:  # fmt: skip
    """Draws the series as one SVG. Without end labels (narrow screens) a legend has to name the lines."""
    shown = [_drawable(one, x, y) for one in series]
    shown = [one for one in shown if one.points or one.markers or any(one.thin)]
    if not shown:
        return tag("p", "Nothing was recorded that could be drawn here.", class_="gf-empty")
    right = 24.0 + (max(len(shorten(one.label)) for one in shown) * CHARACTER + 8 if end_labels else 0)
    frame = make_frame((width, height), (52.0, 30.0, right, 50.0), x, y, _extent(shown))
    curves = [_curve(frame, one) for one in shown]
    labels = _end_labels(frame, shown) if end_labels else None
    return drawing(frame, x, y, title, clipped(frame, *curves), _beyond(frame, shown, x, y), labels, readable=True)


def _drawable(one: Series, x: Axis, y: Axis) -> Series:
    """Returns the series with only the points that the axes can show."""

    def inside(points: Sequence[Point]) -> list[Point]:
        low, high = x.low if x.low is not None else -1e300, x.high if x.high is not None else 1e300
        return [p for p in usable(points, x) if low <= p[0] <= high and (y.kind == "linear" or p[1] > 0)]

    thin = tuple(inside(line) for line in one.thin)
    return replace(one, points=inside(one.points), thin=thin, markers=inside(one.markers))


def _extent(shown: Sequence[Series]) -> list[Point]:
    """Returns points whose range the axes must cover: the x of all points, and the y of the points of series that are
    not stray (of all series if all are)."""
    steady = [one for one in shown if not one.stray] or list(shown)
    every = [p for one in steady for line in (one.points, one.markers, *one.thin) for p in line]
    level = every[0][1]
    return every + [(p[0], level) for one in shown for line in (one.points, *one.thin) for p in line]


def _curve(frame: Frame, one: Series) -> Markup:
    """Draws one arm: the seeds' lines, the mean in front of them, the measurements, and a cross at an early end."""
    pieces = [tag("path", d=path(map(frame.at, line)), class_="gf-thin") for line in one.thin if line]
    if one.points:
        line = path(map(frame.at, one.points))
        pieces.append(tag("path", d=line, class_="gf-mean", stroke_dasharray=dash(one.style)))
    dots = [*(one.points if one.dots else ()), *one.markers]
    pieces += [marker(one.style, *frame.at(p), title=f"{one.label}: {fixed(p[1], 3)} at {si(p[0])}") for p in dots]
    end = _end(frame, one)
    if one.ended and end:
        pieces.append(_cross(*end, f"{one.label}: {one.ended}"))
    return tag("g", *pieces, class_=f"gf-series {colour(one.style)}", data_arm=one.style, data_label=one.label)


def _beyond(frame: Frame, shown: Sequence[Series], x: Axis, y: Axis) -> Markup:
    """Draws triangles at the upper edge where lines exceed the upper limit of the y axis, each with the highest value
    reached; triangles closer than MERGED are drawn as one."""
    if y.high is None:
        return Markup("")
    lines = [(one.label, line) for one in shown if not one.stray for line in (one.points, *one.thin)]
    peaks = sorted((frame.x(p[0]), p, label) for label, line in lines for p in _peaks(line, frame.y.high))
    places: list[list[tuple[float, Point, str]]] = []
    for peak in peaks:
        if places and peak[0] - places[-1][0][0] < MERGED:
            places[-1].append(peak)
        else:
            places.append([peak])
    pieces = []
    for place in places:
        at, (where, value), _ = max(place, key=lambda peak: peak[1][1])
        who = ", ".join(dict.fromkeys(label for _, _, label in place))
        words = f"Beyond the axis: up to {fixed(value, 2)} at {si(where)} {x.unit}: {who}".replace(" :", ":")
        left = at > frame.right - 60
        pieces += [
            tag("path", tag("title", words), d=_triangle(at, frame.top - 12), class_="gf-beyond"),
            tag("text", fixed(value, 1), x=at + (-9 if left else 9), y=frame.top - 3, class_="gf-tick",
                text_anchor="end" if left else "start"),
        ]  # fmt: skip
    return join(pieces)


def _peaks(line: Sequence[Point], limit: float) -> list[Point]:
    """Returns the highest point of each part of a line that is above `limit`."""
    over = itertools.groupby(line, key=lambda p: p[1] > limit * (1 + 1e-9))
    return [max(stretch, key=lambda p: p[1]) for beyond, stretch in over if beyond]


def _triangle(x: float, top: float) -> str:
    """Returns the outline (`d` of a <path>) of a small triangle whose upper corner is at (x, top)."""
    return f"M{number(x)},{number(top)}l6,10h-12z"


def _end(frame: Frame, one: Series) -> Point | None:
    """Returns the place in pixels where a series ends or last leaves the frame; None for a series without points."""
    line = next((line for line in (one.points, *one.thin, one.markers) if line), None)
    if line is None:
        return None
    last = len(line) - 1
    while last > 0 and not frame.top <= frame.y(line[last][1]) <= frame.bottom:
        last -= 1
    (x, y), edge = frame.at(line[last]), frame.top if frame.y(line[-1][1]) < frame.top else frame.bottom
    if last == len(line) - 1 or not frame.top <= y <= frame.bottom:
        return x, min(max(y, frame.top), frame.bottom)
    nx, ny = frame.at(line[last + 1])
    return x + (nx - x) * (edge - y) / (ny - y), edge


def _cross(x: float, y: float, title: str) -> Markup:
    """Draws a cross at (x, y) in pixels, the mark of a line that stopped early; `title` is its text on hover."""
    d = f"M{number(x - 5)},{number(y - 5)}l10,10m0,-10l-10,10"
    return tag("path", tag("title", title), d=d, class_="gf-ended")


def _end_labels(frame: Frame, shown: Sequence[Series]) -> Markup:
    """Draws the names of the lines at their ends, moved apart to avoid overlap, with a thin line from the end to a
    moved name."""
    ended = [(one, end) for one in shown if (end := _end(frame, one))]
    named = [(one, end) for one, end in ended if end[0] > frame.right - EARLY]
    pieces = _inline_labels(frame, [(one, end) for one, end in ended if end[0] <= frame.right - EARLY])
    levels = spread([y for _, (_, y) in named], 17.0, frame.top - 4, frame.bottom + 4)
    for (one, (x, y)), level in zip(named, levels, strict=True):
        start = min(x + 8, frame.right + 4)
        leader = f"M{number(start)},{number(y)}L{number(frame.right + 14)},{number(level)}"
        moved = abs(y - level) > 3 or start < frame.right
        pieces.append(tag(
            "g", tag("title", one.label), tag("path", d=leader, class_="gf-leader") if moved else None,
            tag("text", shorten(one.label), x=frame.right + 18, y=level + 4, class_="gf-name"),
            class_=colour(one.style), data_arm=one.style,
        ))  # fmt: skip
    return join(pieces)


def _inline_labels(frame: Frame, ended: Sequence[tuple[Series, Point]]) -> list[Markup]:
    """Draws the names of lines that end early next to their ends, stacked to avoid overlap."""
    pieces: list[Markup] = []
    taken: list[Point] = []
    for one, (x, y) in ended:
        low = y < frame.top + 20
        level = y + 5 if low else y - 9
        while any(abs(level - b) < 15 and abs(x - a) < 30 * CHARACTER for a, b in taken):
            level += 15 if low else -15
        taken.append((x, level))
        words = tag("text", shorten(one.label), x=x + 11, y=level, class_="gf-name")
        pieces.append(tag("g", words, class_=colour(one.style), data_arm=one.style))
    return pieces


def legend(series: Sequence[Series]) -> Markup:
    """Returns a legend as HTML: one button per arm, with which the page's script hides and shows the arm's line."""
    items = []
    for one in series:
        note = tag("span", one.note, class_="gf-note") if one.note else None
        button = tag(
            "button", swatch(one.style), tag("span", breakable(one.label, "+"), class_="gf-label"),
            type="button", class_=colour(one.style), aria_pressed="true", data_arm=one.style,
        )  # fmt: skip
        items.append(tag("li", button, note))
    return tag("ul", *items, class_="gf-legend", aria_label="Arms; press one to hide or show it")
