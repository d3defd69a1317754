"""Drawings of the package as SVG files, in the colours of a sheet of paper."""

from __future__ import annotations

import re
from collections.abc import Sequence

from glassformer.figures import Markup, stylesheet, tag

HEAD = 'xmlns="http://www.w3.org/2000/svg" style="font-family: system-ui, sans-serif" '
PAPER = "#fdfdfb"


def style_of(inner: str) -> Markup:
    """Returns the rules of the style sheet that a drawing uses, as an element."""
    used = set(re.findall(r"gf-[a-z0-9]+", inner))
    css = stylesheet().split("@media print")[0]
    rules = [
        f"{selector.strip()} {{{body}}}"
        for selector, body in re.findall(r"([^{}@/]+)\{([^{}]*)\}", css)
        if used & set(re.findall(r"gf-[a-z0-9]+", selector))
    ]
    colours = re.search(r":root\s*\{[^{}]*\}", css)
    assert colours is not None
    return tag("style", Markup("\n".join([colours[0], *dict.fromkeys(rules)])))


def panels(charts: Sequence[Markup], label: str, width: int, height: int, columns: int = 2, gap: int = 24) -> str:
    """Returns charts of one size in rows of `columns`, as the text of a file."""
    placed = []
    for at, chart in enumerate(charts):
        row, column = divmod(at, columns)
        place = f'x="{column * (width + gap)}" y="{row * (height + gap)}" width="{width}" height="{height}"'
        placed.append(Markup(re.sub(r' data-frame="[^"]*"', "", chart).replace('class="gf-chart"', place, 1)))
    rows, across = -(-len(charts) // columns), min(columns, len(charts))
    box = f"-12 -8 {across * (width + gap) - gap + 24} {rows * (height + gap) - gap + 16}"
    paper = tag("rect", x=-12.0, y=-8.0, width="100%", height="100%", fill=PAPER)
    style = style_of("gf-chart".join(["", *placed]))
    outer = tag("svg", style, paper, *placed, class_="gf-chart", viewBox=box, role="img",
                aria_label=label)  # fmt: skip
    return str(outer).replace("<svg ", f"<svg {HEAD}", 1) + "\n"
