"""The best learning rate of each arm from runs at several: which are tried, which is chosen, how much it matters.

Rates are counted in powers of FACTOR from the rate of the usual rule (`training.Recipe.peak_learning_rate`): power -1
is half of it. A loss is `math.inf` where the run diverged, which is worse than any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

FACTOR = 2.0
"""Between neighbours of a grid, which then holds a rate within sqrt 2 of the best one: in the published runs of StepLaw
(2503.04715; 17 models and budgets) that costs 0.2 % of the loss in the median."""
START = (-1, 0, 1)
"""Powers that are tried first."""
EXTENSIONS = 5
"""Rates that are added at most: 32 times less or more than the first grid."""
TUNING_SEEDS = 2
"""Of every rate, the same for all arms."""

Curve = Mapping[int, Sequence[float]]
"""Power -> the losses of its seeds."""


@dataclass(frozen=True)
class Choice:
    """The best rate of an arm, as a power of FACTOR that need not be whole."""

    power: float
    best: int
    """The power of the grid with the lowest mean loss."""
    settled: bool
    """Whether there are worse rates on both sides of it."""

    @property
    def between(self) -> bool:
        """Whether it lies between rates that were tried."""
        return self.power != self.best


def best(curve: Curve) -> int:
    """The power with the lowest mean loss; of equal ones the lower rate, which is the safer."""
    return min(curve, key=lambda power: (fmean(curve[power]), power))


def choose(curve: Curve) -> Choice:
    """The minimum of the parabola through the best rate and its two neighbours, losses as means over the seeds against
    the logarithm of the rate; the best rate itself where one of the three diverged, or it is the last on its side."""
    middle = best(curve)
    settled = min(curve) < middle < max(curve)
    left, centre, right = (fmean(curve.get(power, [math.inf])) for power in (middle - 1, middle, middle + 1))
    bend = left - 2 * centre + right
    if not math.isfinite(bend) or bend == 0:
        return Choice(float(middle), middle, settled)
    return Choice(middle + (left - right) / (2 * bend), middle, settled)


def wider(curves: Mapping[str, Curve]) -> list[int]:
    """The powers of the grid with one more on each side on which some arm has its best rate at the edge: for all arms
    alike, so that each has as many trials. Raises ValueError where the arms have not had the same ones."""
    powers = {tuple(sorted(curve)) for curve in curves.values()}
    trials = {len(losses) for curve in curves.values() for losses in curve.values()}
    if len(powers) != 1 or len(trials) != 1:
        raise ValueError(f"arms were tried unequally: at {sorted(powers)}, with {sorted(trials)} seeds")
    grid = list(powers.pop())
    found = {best(curve) for curve in curves.values()}
    return [grid[0] - 1] * (grid[0] in found) + grid + [grid[-1] + 1] * (grid[-1] in found)


def search(measure: Callable[[list[int]], Mapping[str, Curve]], powers: Sequence[int] = START) -> Mapping[str, Curve]:
    """The curves of a grid that is widened until no arm has its best rate at an edge, or EXTENSIONS were added to
    START. `measure` tries powers, those of before among them, with every arm."""
    grid = sorted({*START, *powers})
    while True:
        curves = measure(grid)
        following = wider(curves)
        if following == grid or len(following) > len(START) + EXTENSIONS:
            return curves
        grid = following


def sensitivity(curve: Curve, start: float) -> float:
    """What a rate costs that nobody tuned: E[min(l, l0) - l*] over the rates of the grid and their seeds, in nats.
    l* is the lowest mean loss, l0 = `start` the loss before the first step (Wortsman et al. 2023, 2309.14322)."""
    lowest = min(fmean(losses) for losses in curve.values())
    return fmean(min(loss, start) - min(lowest, start) for losses in curve.values() for loss in losses)
