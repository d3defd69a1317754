"""Styles that distinguish arms, by number: a colour, a dash and a marker, so that no reader depends only on colour."""

from __future__ import annotations

from .markup import Markup, tag

COLOURS = 6
"""Number of colours that colour-blind readers can distinguish, on light and dark backgrounds."""
DASHES = ("", "7 3", "2 2.6", "9 3 2 3", "14 4", "5 2 1.5 2 1.5 2")
MARKERS = ("circle", "square", "triangle", "diamond", "down", "cross")


def colour(style: int) -> str:
    """Returns the CSS class that sets `--c`, the colour of an arm with this style number."""
    return f"gf-c{style % COLOURS}"


def dash(style: int) -> str | None:
    """Returns the attribute stroke-dasharray of the line of an arm with this style number; None if the line is solid,
    as for style 0 and some others. Colour and dash together repeat after 36 styles."""
    return DASHES[(style + style // COLOURS) % len(DASHES)] or None


def marker(style: int, x: float, y: float, size: float = 4.0, title: str = "", **attributes: object) -> Markup:
    """Draws the marker of an arm with this style number, centred at (x, y) in pixels; `title` is its text on hover."""
    shape = MARKERS[(style + 2 * (style // COLOURS) + style // 36) % len(MARKERS)]
    inside = tag("title", title) if title else None
    if shape == "circle":
        return tag("circle", inside, cx=float(x), cy=float(y), r=float(size), class_="gf-marker", **attributes)
    return tag("path", inside, d=_outline(shape, x, y, size), class_="gf-marker", **attributes)


def _outline(shape: str, x: float, y: float, size: float) -> str:
    """Returns the outline (`d` of a <path>) of a marker's shape other than a circle; all have about the same area."""
    s = size * 1.2
    corners = {
        "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
        "triangle": [(0, -1.1), (1.05, 0.8), (-1.05, 0.8)],
        "diamond": [(0, -1.15), (1.15, 0), (0, 1.15), (-1.15, 0)],
        "down": [(0, 1.1), (1.05, -0.8), (-1.05, -0.8)],
        "cross": [(-1, -0.35), (-0.35, -0.35), (-0.35, -1), (0.35, -1), (0.35, -0.35), (1, -0.35),
                  (1, 0.35), (0.35, 0.35), (0.35, 1), (-0.35, 1), (-0.35, 0.35), (-1, 0.35)],
    }[shape]  # fmt: skip
    return "M" + "L".join(f"{x + s * dx:.2f},{y + s * dy:.2f}" for dx, dy in corners) + "Z"


def swatch(style: int) -> Markup:
    """Draws the short line with a marker that identifies an arm with this style number in tables and legends."""
    line = tag("path", d="M1,7H33", class_="gf-mean", stroke_dasharray=dash(style))
    return tag(
        "svg", line, marker(style, 17, 7, 3.6),
        class_=f"gf-swatch {colour(style)}", viewBox="0 0 34 14", width=34, height=14, aria_hidden="true",
    )  # fmt: skip
