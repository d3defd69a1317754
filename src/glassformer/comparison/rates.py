"""Search for the best learning rate of each arm: which rates are tried, which is chosen, and how much the rate matters.

Rates are counted in powers of FACTOR from the default rate (`training.Recipe.peak_learning_rate`): power -1 is half of
it. A loss is `math.inf` if the run diverged, which is worse than any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

FACTOR = 2.0
"""Ratio of neighbouring rates of a grid. The grid then has a rate within sqrt 2 of the best one: in the published runs
of StepLaw (2503.04715; 17 models and budgets) that costs 0.2 % of the loss in the median."""
START = (-1, 0, 1)
"""Learning rates of the first grid, as powers of FACTOR"""
EXTENSIONS = 5
"""Largest number of rates added to the first grid, which reach up to 32 times below its lowest or above its highest
rate"""
TUNING_SEEDS = 2
"""Number of seeds with which every rate is tried; all arms have the same seeds"""

Curve = Mapping[int, Sequence[float]]
"""Learning rate, as a power of FACTOR -> losses, one for each seed"""


@dataclass(frozen=True)
class Choice:
    """Best learning rate of an arm: the default rate times FACTOR**power, where `power` need not be an integer."""

    power: float
    best: int
    """Rate of the grid with the lowest mean loss, as a power of FACTOR"""
    settled: bool
    """True if worse rates were tried on both sides of the best one"""

    @property
    def between(self) -> bool:
        """True if the chosen learning rate is between two that were tried."""
        return self.power != self.best


def best(curve: Curve) -> int:
    """Returns the rate with the lowest mean loss, as a power of FACTOR; of rates with equal loss the lowest, which is
    the safest."""
    return min(curve, key=lambda power: (fmean(curve[power]), power))


def choose(curve: Curve) -> Choice:
    """Returns the learning rate at the minimum of the parabola through the mean losses, against the logarithm of the
    rate, of the best rate tried and its two neighbours. Returns the best rate tried if it is at an edge of the grid, or
    if one of the three diverged."""
    middle = best(curve)
    settled = min(curve) < middle < max(curve)
    left, centre, right = (fmean(curve.get(power, [math.inf])) for power in (middle - 1, middle, middle + 1))
    bend = left - 2 * centre + right
    if not math.isfinite(bend) or bend == 0:
        return Choice(float(middle), middle, settled)
    return Choice(middle + (left - right) / (2 * bend), middle, settled)


def wider(curves: Mapping[str, Curve]) -> list[int]:
    """Returns the grid of learning rates, as powers of FACTOR, with one more rate beyond each edge at which an arm has
    its lowest loss; all arms get this grid, and so the same number of trials. Raises ValueError if the arms in `curves`
    were tried at different rates."""
    powers = {tuple(sorted(curve)) for curve in curves.values()}
    trials = {len(losses) for curve in curves.values() for losses in curve.values()}
    if len(powers) != 1 or len(trials) != 1:
        raise ValueError(f"arms were tried unequally: at {sorted(powers)}, with {sorted(trials)} seeds")
    grid = list(powers.pop())
    found = {best(curve) for curve in curves.values()}
    return [grid[0] - 1] * (grid[0] in found) + grid + [grid[-1] + 1] * (grid[-1] in found)


def search(measure: Callable[[list[int]], Mapping[str, Curve]], powers: Sequence[int] = START) -> Mapping[str, Curve]:
    """Returns {arm: curve} of a grid of rates that is widened until no arm has its best rate at an edge, or until
    EXTENSIONS rates were added to `powers`. `measure` trains every arm at all rates of a grid."""
    grid = sorted({*START, *powers})
    while True:
        curves = measure(grid)
        following = wider(curves)
        if following == grid or len(following) > len(START) + EXTENSIONS:
            return curves
        grid = following


def sensitivity(curve: Curve, start: float) -> float:
    """Returns the expected cost of an untuned rate, in nats: E[min(l, l0) - l*] over the rates of the grid and their
    seeds. l* is the lowest mean loss, l0 = `start` the loss before the first step (Wortsman et al. 2023,
    2309.14322)."""
    lowest = min(fmean(losses) for losses in curve.values())
    return fmean(min(loss, start) - min(lowest, start) for losses in curve.values() for loss in losses)
