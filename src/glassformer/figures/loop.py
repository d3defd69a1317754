"""Drawing of token-by-token generation: steps from left to right, and the way back of each new token to the input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .chart import shorten
from .markup import Markup, join, path, tag
from .wiring import Box

WIDE, HIGH, BETWEEN = 128.0, 44.0, 112.0
"""Width and height of a step, and the space between two steps, in pixels."""
TOP = 30.0
BELOW = 40.0
"""Distance in pixels of the way back below the steps."""


@dataclass(frozen=True)
class LoopSketch:
    """Steps of a loop with the values that pass between them, and a way back labelled `back`.

    `passes` names the value in front of each step and the value after the last step. The way back leaves the value in
    front of step `leaves` and joins the value in front of step `joins`.
    """

    steps: Sequence[Box]
    passes: Sequence[str]
    back: str
    leaves: int
    joins: int


def loop_drawing(sketch: LoopSketch, title: str) -> Markup:
    """Draws the loop as one SVG."""
    middle, pieces = TOP + HIGH / 2, list[Markup]()
    for at, words in enumerate(sketch.passes):
        left = at * (WIDE + BETWEEN)
        right = left + BETWEEN
        pieces += [
            tag("path", d=path([(left + 4, middle), (right - 4, middle)]), class_="gf-wire"),
            tag("path", d=path([(right - 10, middle - 4), (right - 4, middle), (right - 10, middle + 4)]),
                class_="gf-arrow"),
            tag("text", tag("title", words), shorten(words, 15), x=left + BETWEEN / 2, y=middle - 8,
                class_="gf-detail", text_anchor="middle"),
        ]  # fmt: skip
    for at, step in enumerate(sketch.steps):
        left = BETWEEN + at * (WIDE + BETWEEN)
        pieces += [
            tag("rect", tag("title", f"{step.name}: {step.detail}"), x=left, y=TOP, width=WIDE, height=HIGH, rx=6.0,
                class_="gf-box gf-mixer"),
            tag("text", step.name, x=left + WIDE / 2, y=TOP + 19, class_="gf-part", text_anchor="middle"),
            tag("text", shorten(step.detail, 19), x=left + WIDE / 2, y=TOP + 34, class_="gf-detail",
                text_anchor="middle"),
        ]  # fmt: skip
    start, end = (at * (WIDE + BETWEEN) + BETWEEN / 2 for at in (sketch.leaves, sketch.joins))
    low = TOP + HIGH + BELOW
    pieces += [
        tag("path", d=path([(start, middle), (start, low), (end, low), (end, middle + 3)]), class_="gf-wire"),
        tag("path", d=path([(end - 4, middle + 10), (end, middle + 3), (end + 4, middle + 10)]), class_="gf-arrow"),
        tag("text", sketch.back, x=(start + end) / 2, y=low - 7, class_="gf-detail", text_anchor="middle"),
    ]
    width, height = len(sketch.steps) * (WIDE + BETWEEN) + BETWEEN, low + 8
    return tag("svg", join(pieces), class_="gf-wiring", viewBox=f"0 0 {width:.0f} {height:.0f}", width=round(width),
               height=round(height), role="img", aria_label=title)  # fmt: skip
