"""Power: the number of seeds that shows a difference of a given size, planned from a pilot.

A pilot has separate seeds. If they counted in the comparison that they plan, pilots with a small variance by chance
would plan few seeds and then make the intervals too narrow: 9 % false verdicts after a pilot of three seeds instead of
5 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from statistics import fmean

import numpy as np

from glassformer.errors import RequestError
from glassformer.runs.contrasts import SEPARATE, Pairs, contrasts
from glassformer.runs.results import Power, RunResult, SeedsNeeded
from glassformer.runs.simultaneous import POWER, power, quantile
from glassformer.runs.verdicts import Table, against_first
from glassformer.thresholds import CONFIDENCE

MOST_SEEDS = 1000
"""Maximum number of seeds of a comparison. Intervals narrow with the square root of the number, so ten are many."""
PILOT = "pilot"
"""Folder of the pilot, inside that of the comparison."""
PILOT_SEEDS = 3
"""Minimum number of seeds of a pilot."""
FIRST_SEED = MOST_SEEDS
"""First seed of a pilot: a comparison has smaller ones."""
LARGEST_EFFECT = 0.5
"""Largest difference, as a share of a loss, that can be planned for."""


def check_effect(effect: object, arms: int) -> None:
    """Raises RequestError for fewer than two arms, and for an effect that is not a number above 0 and at most
    `LARGEST_EFFECT`, as a share of the loss."""
    if arms < 2:
        raise RequestError(
            "--power plans for a difference between models; name two",
            code="missing", field="power", value=effect, expected="two models",
        )  # fmt: skip
    number = isinstance(effect, Real) and not isinstance(effect, bool)
    if not number or not 0 < float(effect) <= LARGEST_EFFECT:  # type: ignore[arg-type]
        raise RequestError(
            code="range", field="power", value=effect,
            expected=f"a difference such as 1% or 0.01, at most {LARGEST_EFFECT:.0%} of the loss",
        )  # fmt: skip


def needed(runs: Sequence[RunResult], effect: float, confidence: float = CONFIDENCE) -> Power | None:
    """Returns the seeds and hours that show, with a power of 80 %, a difference of `effect` times the loss of the
    reference arm (`against_first`) between each other arm and it; None if no arm shares two finished seeds with it."""
    pairs = against_first(runs)
    table = Table.of(runs, pairs)
    family = [pair for pair in pairs if table.shared(pair) > 1]
    if not family:
        return None
    names = list(dict.fromkeys(name for pair in family for name in pair))
    losses = table.columns(names)
    made = contrasts(losses, [(names.index(a), names.index(b)) for a, b in family])
    difference = effect * float(np.nanmean(losses[:, 0]))
    found = []
    for i, (a, b) in enumerate(family):
        sd = float(made.error[i]) * math.sqrt(int(made.seeds[i]))
        df, pooled = float(made.df[i]), bool(made.pooled[i])
        low, high = sd_interval(sd, df, confidence)
        few, seeds, many = (seeds_for(difference, one, made.pairs, pooled, confidence) for one in (low, sd, high))
        found.append(SeedsNeeded(
            a=a, b=b, sd=sd, sd_low=low, sd_high=high, degrees_of_freedom=df, pooled=pooled,
            seeds=seeds, seeds_low=few, seeds_high=many,
        ))  # fmt: skip
    each = [one.seeds for one in found]
    seeds = None if None in each else max(n for n in each if n is not None)
    pilot = len({run.seed for run in runs})
    hours = sum(_seconds(runs, name) for name in dict.fromkeys(run.name for run in runs)) / 3600
    return Power(
        effect=effect, difference=difference, power=POWER, confidence=confidence, pilot=pilot, pairs=found,
        seeds=seeds, hours=None if seeds is None else seeds * hours,
    )  # fmt: skip


def sd_interval(sd: float, df: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Returns the interval of a standard deviation of normal values: sd sqrt(df / χ²) at both quantiles of χ²(df). With
    three seeds and one pair it reaches from 0.52 to 6.3 times the estimate."""
    from scipy.special import chdtri, gammaincinv

    tail = (1 - confidence) / 2
    return sd * math.sqrt(df / chdtri(df, tail)), sd * math.sqrt(df / (2 * gammaincinv(df / 2, tail)))


def seeds_for(
    difference: float, sd: float, pairs: Pairs = ((0, 1),), pooled: bool = False,
    confidence: float = CONFIDENCE, wanted: float = POWER,
) -> int | None:  # fmt: skip
    """Returns the smallest number of seeds that shows a difference in a share `wanted` of comparisons, where `sd` is
    the standard deviation of the paired difference; None if MOST_SEEDS are not enough.

    The test is a noncentral t with the degrees of freedom and the quantile for that number of seeds (`runs.contrasts`).
    """
    arms = len({arm for pair in pairs for arm in pair})

    def enough(seeds: int) -> bool:
        df = (seeds - 1) * (arms - 1 if pooled else 1)
        level = (1 - confidence) * (1 if pooled or arms == 2 else SEPARATE)
        critical = quantile(level, pairs, df, balanced=pooled)
        return power(difference / sd * math.sqrt(seeds), critical, df) >= wanted

    if sd == 0 or enough(2):
        return 2
    low, high = 2, 4
    while not enough(high):
        if high == MOST_SEEDS:
            return None
        low, high = high, min(2 * high, MOST_SEEDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _seconds(runs: Sequence[RunResult], name: str) -> float:
    """Returns the mean training time of the runs of an arm that were trained to their end."""
    return fmean([run.train.seconds for run in runs if run.name == name and run.status == "ok" and run.train] or [0.0])
