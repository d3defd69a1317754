"""Stacked bars with a mark for a limit, and drawings of accelerators in nodes."""

from __future__ import annotations

from collections.abc import Sequence

from .markup import Markup, join, number, tag
from .style import colour

WIDTH, HEIGHT = 720, 62
_TOP, _THICK = 20.0, 26.0


def stacked_bar(parts: Sequence[tuple[str, float]], title: str, limit: float | None = None, told: str = "") -> Markup:
    """Draws (name, value) parts next to each other as one bar, each part as wide as its share; a labelled line across
    the bar marks the value `limit`."""
    whole = max(sum(value for _, value in parts), limit or 0.0, 1e-300)
    place, pieces = 0.0, []
    for index, (name, value) in enumerate(parts):
        wide = WIDTH * value / whole
        if wide > 0.4:
            box = tag("rect", tag("title", name), x=place, y=_TOP, width=max(wide - 1.5, 0.4), height=_THICK, rx=2.0,
                      class_="gf-part-bar", fill_opacity=_depth(index))  # fmt: skip
            pieces.append(tag("g", box, class_=colour(index)))
        place += wide
    if limit is not None:
        at = number(min(WIDTH * limit / whole, WIDTH - 1.0))
        far = WIDTH * limit / whole > WIDTH / 2
        pieces.append(tag("path", d=f"M{at},{number(_TOP - 6)}V{number(_TOP + _THICK + 6)}", class_="gf-limit"))
        anchor = "end" if far else "start"
        pieces.append(tag("text", told, x=float(at), y=_TOP - 9, class_="gf-tick", text_anchor=anchor))
    view = f"0 0 {WIDTH} {HEIGHT}"
    return tag("svg", *pieces, class_="gf-chart gf-bar", viewBox=view, role="img", aria_label=title)


def part_swatch(index: int) -> Markup:
    """Returns a small square in the colour of the bar's part `index`, for a table."""
    box = tag("rect", x=1.0, y=1.0, width=12.0, height=12.0, rx=2.0, class_="gf-part-bar", fill_opacity=_depth(index))
    return tag("svg", box, class_=f"gf-swatch {colour(index)}", viewBox="0 0 14 14", width=14, height=14,
               aria_hidden="true")  # fmt: skip


def _depth(index: int) -> str:
    """Returns the opacity of the part `index` of a bar: the seventh and later parts repeat the six colours, lighter."""
    return "1" if index < 6 else "0.45"


def node_drawing(groups: Sequence[int], node: int, title: str) -> Markup:
    """Draws a square for each rank (one accelerator) and a frame around each node of `node` ranks; `groups` holds the
    group number of each rank, which gives the colour."""
    side, gap, across = 14, 3, 6
    columns = min(node, 8)
    rows = -(-node // columns)
    wide, high = columns * (side + gap) + 9, rows * (side + gap) + 9
    nodes = -(-len(groups) // node)
    pieces: list[Markup] = []
    for index in range(nodes):
        x, y = index % across * (wide + 8), index // across * (high + 8)
        pieces.append(tag("rect", x=x + 0.5, y=y + 0.5, width=wide, height=high, rx=4, class_="gf-stage"))
        for place, group in enumerate(groups[index * node : (index + 1) * node]):
            left, top = x + 6 + place % columns * (side + gap), y + 6 + place // columns * (side + gap)
            box = tag("rect", x=left, y=top, width=side, height=side, rx=2, class_="gf-part-bar",
                      fill_opacity=_depth(group % 12))  # fmt: skip
            pieces.append(tag("g", box, class_=colour(group)))
    full = min(nodes, across) * (wide + 8), -(-nodes // across) * (high + 8)
    return tag("svg", join(pieces), class_="gf-nodes", viewBox=f"0 0 {full[0]} {full[1]}", width=full[0],
               height=full[1], role="img", aria_label=title)  # fmt: skip
