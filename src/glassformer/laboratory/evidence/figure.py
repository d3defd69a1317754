"""Measured values (`Figure`), and the one rule that derives a verdict from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

from glassformer.files import Written
from glassformer.runs.contrasts import mean_interval
from glassformer.thresholds import CONFIDENCE

Kind = Literal["exact", "measured", "scoped", "undecidable"]
Verdict = Literal["holds", "does not hold", "cannot be shown at this size"]

KINDS: dict[Kind, str] = {
    "exact": "an identity or a count: the same on every machine",
    "measured": "measured here, with an interval",
    "scoped": "measured here; what it says of other sizes and texts is open",
    "undecidable": "out of reach of a laboratory of this size",
}
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
OPEN: Verdict = "cannot be shown at this size"


class Figure(Written):
    """One measured value (a number with its interval), and the bounds that the claim sets for it.

    low, high     interval; equal to the value if it is deterministic, None if randomness was not measured
    least, most   bounds of the claim, which holds if the whole interval is within them; None without a bound
    published     value in the source
    count         number of measurements in the interval: seeds, rounds, draws
    """

    name: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    least: float | None = None
    most: float | None = None
    published: float | None = None
    count: int | None = None

    @property
    def judged(self) -> bool:
        return self.least is not None or self.most is not None

    @property
    def verdict(self) -> Verdict:
        """Verdict of the value: `holds` if the whole interval is within the claim's bounds, `does not hold` if all of
        it is outside."""
        if self.low is None or self.high is None:
            return OPEN
        if (self.least is not None and self.high < self.least) or (self.most is not None and self.low > self.most):
            return FAILS
        within = (self.least is None or self.low >= self.least) and (self.most is None or self.high <= self.most)
        return HOLDS if within else OPEN

    @property
    def needed(self) -> int | None:
        """Number of measurements n after which the interval, which narrows as 1 / sqrt(n), would clear the nearest
        bound if the value stayed. None if the verdict is decided already, without an interval, and if the value equals
        a bound."""
        if self.verdict != OPEN or self.low is None or self.high is None or self.count is None:
            return None
        apart = min(abs(self.value - bound) for bound in (self.least, self.most) if bound is not None)
        return math.ceil(self.count * ((self.high - self.low) / 2 / apart) ** 2) if apart else None


Log = Literal["", "x", "y", "xy"]
"""Logarithmic axes of a picture."""


class MeanCurve(Written):
    """One line of a chart: values y over x, a row for each seed; a row is shorter if its run diverged.

    dots    True to draw points without a line
    """

    label: str
    x: tuple[float, ...]
    y: tuple[tuple[float, ...], ...]
    dots: bool = False


class Picture(Written):
    """Chart of several curves over a common axis.

    title    name and unit of the values
    x        name of the horizontal axis
    log      axes that are logarithmic
    """

    title: str
    x: str
    curves: tuple[MeanCurve, ...]
    log: Log = ""


class Outcome(Written):
    """Result of one measurement of a claim: its measured values, and their scale and certainty.

    size      scale of the measurement: "1M parameters, 1.5M tokens, python-docs"; of exact figures, the counted objects
    sure      certainty: seeds, rounds or tolerance
    notes     further remarks for a reader, a sentence each
    pictures  curves of the measurement
    """

    figures: tuple[Figure, ...]
    size: str
    sure: str
    notes: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()


def verdict(kind: Kind, figures: Sequence[Figure], tiny: bool = False) -> Verdict:
    """Returns the joint verdict of all measured values with bounds: `holds` if each holds, `does not hold` if one does
    not. A tiny measurement decides only exact values."""
    each = {figure.verdict for figure in figures if figure.judged}
    if not each or kind == "undecidable" or (tiny and kind != "exact"):
        return OPEN
    if FAILS in each:
        return FAILS
    return HOLDS if each == {HOLDS} else OPEN


def exact(
    name: str,
    value: float,
    unit: str = "",
    /,
    *,
    least: float | None = None,
    most: float | None = None,
    published: float | None = None,
) -> Figure:
    """Returns a deterministic value as a `Figure` whose interval is the value itself."""
    at = float(value)
    return Figure(name=name, value=at, unit=unit, low=at, high=at, least=least, most=most, published=published)


def sampled(
    name: str,
    values: Sequence[float],
    unit: str = "",
    /,
    *,
    least: float | None = None,
    most: float | None = None,
    published: float | None = None,
) -> Figure:
    """Returns the mean of independent measurements as a `Figure` with Student's interval; without an interval if there
    are fewer than two."""
    mean, low, high = float(values[0]), None, None
    if len(values) > 1:
        mean, low, high = mean_interval([float(value) for value in values], CONFIDENCE)
    return Figure(name=name, value=mean, unit=unit, low=low, high=high, least=least, most=most, published=published,
                  count=len(values))  # fmt: skip


def curve(label: str, x: Sequence[float], y: Sequence[Sequence[float]], *, dots: bool = False) -> MeanCurve:
    """Returns a chart's curve made of the rows `y`, one for each seed, rounded to four digits; a row ends before its
    first infinite value."""
    rows = tuple(tuple(float(f"{value:.4g}") for value in itertools.takewhile(math.isfinite, row)) for row in y)
    return MeanCurve(label=label, x=tuple(float(f"{value:.6g}") for value in x), y=rows, dots=dots)
