"""Claims about trained models: arms, and the claimed differences between their losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from glassformer.laboratory.evidence.bench import Bench, Compared
from glassformer.laboratory.evidence.figure import Figure, Outcome, sampled

ALIKE = 0.005
"""Relative difference below which losses count as equal: about the spread of seeds at 1M parameters."""

BRIEF, SHORT, LONG = 50_000, 400_000, 1_500_000
"""Budgets in tokens: a hundred steps of short rows; enough to show large effects; enough for the order of FFNs at 1M
parameters."""


@dataclass(frozen=True)
class Gap:
    """Claimed difference of two arms' losses: loss(b) - loss(a), in nats or relative to a's loss, with the bounds of
    the claim."""

    a: str
    b: str
    least: float | None = None
    most: float | None = None
    published: float | None = None
    relative: bool = False

    def figure(self, found: Compared) -> Figure:
        bounds = {"least": self.least, "most": self.most, "published": self.published}
        losses = found.losses(self.a)
        gaps = found.gaps(self.a, self.b)
        if not gaps:
            return lost(found, (self.a, self.b))
        if self.relative:
            shares = [gap / losses[seed] for gap, seed in zip(gaps, found.common(self.a, self.b), strict=True)]
            figure = sampled(f"loss of {self.b} less that of {self.a}, in shares of it", shares, **bounds)
            return found.judged(figure, self.a, self.b)
        return found.gap(self.a, self.b, **bounds) or lost(found, (self.a, self.b))


def alike(a: str, b: str, share: float = ALIKE) -> Gap:
    """Returns the claimed difference that two arms end at equal losses, up to a relative difference of `share`."""
    return Gap(a, b, -share, share, 0.0, relative=True)


def lost(found: Compared, arms: Sequence[str]) -> Figure:
    """Returns, as a measured value that decides nothing, the number of diverged runs; it is used if no seed of the arms
    finished."""
    return Figure(name=f"runs of {' and '.join(arms)} that diverged", value=sum(map(found.diverged, arms)), most=0)


def contrast(*gaps: Gap, tokens: int, notes: Sequence[str] = (), **options: Any) -> Callable[[Bench], Outcome]:
    """Returns a claim's measuring function: it trains the arms of these gaps on a bench and measures the differences of
    their losses. `options` are those of `Bench.compare`."""
    arms = list(dict.fromkeys(arm for gap in gaps for arm in (gap.a, gap.b)))

    def measure(bench: Bench) -> Outcome:
        found = bench.compare(arms, tokens, **options)
        return outcome(found, [gap.figure(found) for gap in gaps], notes)

    return measure


def outcome(found: Compared, figures: Sequence[Figure], notes: Sequence[str] = ()) -> Outcome:
    """Returns the outcome of a claim with these measured values, the mean loss of each arm and the scale of the
    comparison."""
    losses = [
        Figure(name=f"loss of {arm}", value=found.mean(arm), unit="nats")
        for arm in found.results.names
        if found.losses(arm)
    ]
    return Outcome(figures=(*figures, *losses), size=found.size, sure=found.sure, notes=(*notes, *found.notes))
