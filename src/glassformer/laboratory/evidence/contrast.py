"""Claims about trained models: arms, and how far apart their losses should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from glassformer.laboratory.evidence.bench import Bench, Compared
from glassformer.laboratory.evidence.figure import Figure, Outcome, sampled

ALIKE = 0.005
"""Losses that differ by less than this share count as equal: about what seeds differ by at 1M parameters."""

BRIEF, SHORT, LONG = 50_000, 400_000, 1_500_000
"""Budgets in tokens: a hundred steps of short rows, what shows large effects, and what is needed for the order of FFNs
at 1M parameters."""


@dataclass(frozen=True)
class Gap:
    """loss(b) - loss(a), in nats, or in shares of a's loss; and where the claim puts it."""

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
    """The claim that two arms end at one loss."""
    return Gap(a, b, -share, share, 0.0, relative=True)


def lost(found: Compared, arms: Sequence[str]) -> Figure:
    """What stands for a figure of which no seed is left: it decides nothing."""
    return Figure(name=f"runs of {' and '.join(arms)} that diverged", value=sum(map(found.diverged, arms)), most=0)


def contrast(*gaps: Gap, tokens: int, notes: Sequence[str] = (), **options: Any) -> Callable[[Bench], Outcome]:
    """Returns the measurement that trains the arms of these gaps; `options` are those of `Bench.compare`."""
    arms = list(dict.fromkeys(arm for gap in gaps for arm in (gap.a, gap.b)))

    def measure(bench: Bench) -> Outcome:
        found = bench.compare(arms, tokens, **options)
        return outcome(found, [gap.figure(found) for gap in gaps], notes)

    return measure


def outcome(found: Compared, figures: Sequence[Figure], notes: Sequence[str] = ()) -> Outcome:
    """The figures with the mean loss of each arm, and what they were shown at."""
    losses = [
        Figure(name=f"loss of {arm}", value=found.mean(arm), unit="nats")
        for arm in found.results.names
        if found.losses(arm)
    ]
    return Outcome(figures=(*figures, *losses), size=found.size, sure=found.sure, notes=(*notes, *found.notes))
