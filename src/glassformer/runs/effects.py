"""Effects of several changes and of pairs of them, from a factorial design: every arm has some of the changes.

    effect of i        mean loss of the arms with i minus mean loss of those without
    interaction of ij  mean loss of the arms with both or neither minus mean loss of those with one of them:
                       half of the difference of the effect of i between arms with j and without

Up to four changes all 2^k combinations are trained. For five, one half is trained, those with an even number of changes
(I = -ABCDE, resolution V): main effects and interactions of two are clear of each other, if none of three matters. Box,
Hunter & Hunter, Statistics for Experimenters, 2005, chapters 5 and 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from glassformer.runs.contrasts import Array, excludes_zero
from glassformer.runs.simultaneous import sidak_quantile

WHOLE = 4
"""Maximum number of changes for which all combinations are trained."""
MOST = 5
"""Maximum number of changes of a factorial design: six would take 32 arms."""
NOTICED = 2.0
"""Number of standard errors above which an interaction is shown."""


def combined(changes: int) -> list[tuple[bool, ...]]:
    """Returns the arms of the design for a number of changes: for each arm, True for the changes that it has; the first
    arm has no change."""
    rows = sorted(product((False, True), repeat=changes), key=lambda row: (sum(row), [not one for one in row]))
    return rows if changes <= WHOLE else [row for row in rows if sum(row) % 2 == 0]


@dataclass(frozen=True)
class Effect:
    of: tuple[int, ...]
    """Index of one change, or of two for their interaction."""
    effect: float
    """Effect in nats: below zero if the change lowers the loss."""
    error: float
    """Standard error of the effect."""
    low: float
    high: float
    df: float

    @property
    def shown(self) -> bool:
        """True if the interval of the effect excludes zero."""
        return excludes_zero(self.low, self.high)

    @property
    def noticed(self) -> bool:
        return abs(self.effect) > NOTICED * self.error


def effects(losses: Array, rows: Sequence[tuple[bool, ...]], confidence: float = 0.95) -> list[Effect]:
    """Returns every main effect, then every interaction of two, from `losses` (seeds, arms), complete, of two seeds or
    more.

    Seeds are blocks, so effects common to a seed cancel. The variance of the noise is the residual one after the means
    of seeds and arms; because every effect weighs all arms equally, that also holds for arms of unequal noise. The
    intervals of the main effects hold together with the given confidence (Šidák), and so do those of the
    interactions."""
    seeds, arms = losses.shape
    left = losses - losses.mean(1, keepdims=True) - losses.mean(0) + losses.mean()
    df = (seeds - 1) * (arms - 1)
    error = float(np.sqrt((left**2).sum() / df * 4 / losses.size))
    found = []
    for size in (1, 2):
        groups = list(combinations(range(len(rows[0])), size))
        half = sidak_quantile(1 - confidence, len(groups), df) * error
        for of in groups:
            signs = np.array([np.prod([1 if row[at] else -1 for at in of]) for row in rows])
            effect = float((losses @ signs).mean() / (arms / 2))
            found.append(Effect(of, effect, error, effect - half, effect + half, df))
    return found


def by_chance(df: float) -> float:
    """Returns the probability that an effect of zero exceeds `NOTICED` standard errors by chance, with `df` degrees of
    freedom."""
    from scipy.special import stdtr

    return float(2 * stdtr(df, -NOTICED))
