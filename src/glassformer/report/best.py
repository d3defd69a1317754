"""Which arm is best in a column: only one that leads by more than the figures are measured to vary."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..figures import finite
from ..runs.arms import Arm, Quantity, points, seed_of
from ..runs.contrasts import mean_interval
from ..runs.results import RunResult, unlike

STRETCHES = 8
LEAST = 0.01
"""No timing is better by less than this share, however steady it was."""


@dataclass(frozen=True)
class Precision:
    """How sure a figure of one run is: `exact`, or what `scatter` says of the run; `margin` is the share by which one
    has to lead where nothing was recorded; `timed` figures compare on one machine alone."""

    margin: float = 0.0
    scatter: Callable[[RunResult], float | None] = lambda run: None
    exact: bool = False
    timed: bool = False


def training_scatter(run: RunResult) -> float | None:
    """Standard deviation of the training speeds of eight equal stretches of a run, from its recorded step times."""
    train = run.train
    record = points([[b, a] for (a, _), (b, _) in zip(train.curve, train.curve_seconds, strict=False)]) if train else []
    speeds = [(b - a) / (t - s) for (s, a), (t, b) in itertools.pairwise(record) if t > s and b > a]
    size = len(speeds) // STRETCHES
    if size < 2:
        return None
    return statistics.stdev(statistics.median(speeds[i * size : (i + 1) * size]) for i in range(STRETCHES))


def generation_scatter(run: RunResult) -> float | None:
    """Standard deviation of the time per token over eight stretches of a generated text, where it was recorded."""
    return finite(run.generation.seconds_per_token_scatter) if run.generation else None


def untimed(arms: Sequence[Arm]) -> str | None:
    """Why speeds of these arms do not compare; None where they do."""
    return unlike([run for arm in arms for run in arm.counted])


def best(quantity: Quantity, better: int, arms: Sequence[Arm], precision: Precision) -> set[int]:
    """The index of the arm that leads all others beyond doubt, or nothing; of exact figures all that share the lead.

    Arms that lost a seed do not take part."""
    means = {arm.index: mean for arm in arms if arm.complete and (mean := arm.mean(quantity)) is not None}
    if not better or len(means) < 2 or (precision.timed and untimed(arms)):
        return set()
    lead = (max if better > 0 else min)(means.values())
    if precision.exact:
        sharing = {index for index, mean in means.items() if math.isclose(mean, lead, rel_tol=1e-6)}
        return sharing if len(sharing) < len(means) else set()
    first = next(arm for arm in arms if means.get(arm.index) == lead)
    others = [arm for arm in arms if arm is not first and arm.index in means]
    return {first.index} if all(_leads(first, other, quantity, better, precision) for other in others) else set()


def _leads(first: Arm, other: Arm, quantity: Quantity, better: int, precision: Precision) -> bool:
    """Whether the lead is more than noise: of the seeds that both have, else of the record of each run."""
    mine, theirs = _by_seed(first, quantity), _by_seed(other, quantity)
    paired = [better * (mine[seed] - theirs[seed]) for seed in mine if seed in theirs]
    level = min(abs(v) for v in (first.mean(quantity) or 0.0, other.mean(quantity) or 0.0))
    if len(paired) > 1:
        _, low, _ = mean_interval(paired, 0.95)
        return low > 0 and statistics.fmean(paired) > (LEAST * level if precision.margin > LEAST else 0.0)
    lead = better * ((first.mean(quantity) or 0.0) - (other.mean(quantity) or 0.0))
    noise = [precision.scatter(run) for arm in (first, other) for run in arm.counted]
    known = [one for one in noise if one is not None]
    if len(known) < len(noise):
        return lead > precision.margin * level
    return lead > max(2 * math.hypot(*known), LEAST * level)


def _by_seed(arm: Arm, quantity: Quantity) -> dict[str, float]:
    return {seed_of(run): value for run in arm.counted if (value := finite(quantity.of(run))) is not None}
