"""Arms: the runs of one model over seeds, and their measured quantities."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from glassformer.figures import finite
from glassformer.runs.results import Dynamics, Generation, RunResult, TrainingResult, Validation

Points = list[tuple[float, float]]
MOST_STEPS, MOST_ROWS, MOST_EXPERTS = 120, 64, 512  # limits of watched data: larger ones are not from this package


def points(curve: Sequence[Sequence[Any]]) -> Points:
    """Returns the points of a recorded curve whose x and y are finite, sorted by x."""
    pairs = [(finite(p[0]), finite(p[1])) for p in curve if len(p) == 2]
    return sorted((a, b) for a, b in pairs if a is not None and b is not None)


@dataclass(frozen=True)
class Quantity:
    """Quantity that is measured of a run: its name, such as `validation.loss`, and the function that reads it."""

    name: str
    of: Callable[[RunResult], float | None]


def _of_training(name: str, read: Callable[[TrainingResult], float | None]) -> Quantity:
    return Quantity(f"train.{name}", lambda run: None if run.train is None else read(run.train))


def _of_validation(name: str, read: Callable[[Validation], float | None]) -> Quantity:
    return Quantity(f"validation.{name}", lambda run: None if run.validation is None else read(run.validation))


def _of_generation(name: str, read: Callable[[Generation], float | None]) -> Quantity:
    return Quantity(f"generation.{name}", lambda run: None if run.generation is None else read(run.generation))


PARAMETERS = Quantity("parameters", lambda run: run.parameters)
LOSS = _of_validation("loss", lambda found: found.loss)
BITS_PER_BYTE = _of_validation("bits_per_byte", lambda found: found.bits_per_byte)
PERPLEXITY = _of_validation("perplexity", lambda found: found.perplexity)
TRAINING_SPEED = _of_training("tokens_per_second", lambda train: train.tokens_per_second)
PEAK_MEMORY = _of_training("peak_memory_bytes", lambda train: train.peak_memory_bytes)
SECONDS_PER_TOKEN = _of_generation("seconds_per_token", lambda found: found.seconds_per_token)
STATE_BYTES = _of_generation("state_bytes_per_token", lambda found: found.state_bytes_per_token)


@dataclass(frozen=True)
class Stat:
    """Values of a quantity over seeds, with their mean, and from two seeds on their sample standard deviation and
    range."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(value / len(self.values) for value in self.values)

    @property
    def spread(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def range(self) -> tuple[float, float] | None:
        return (min(self.values), max(self.values)) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Arm:
    """Arm of a comparison: the runs of one model, one for each seed. `index`, its place among the arms, sets its
    colour."""

    index: int
    name: str
    runs: tuple[RunResult, ...]

    @property
    def finished(self) -> list[RunResult]:
        """Runs that were trained to their end."""
        return [run for run in self.runs if run.status == "ok"]

    @property
    def counted(self) -> list[RunResult]:
        """Runs whose figures count: the finished ones, or all of them if no run finished."""
        return self.finished or list(self.runs)

    @property
    def complete(self) -> bool:
        """True if every seed was trained to its end."""
        return len(self.finished) == len(self.runs)

    @property
    def config(self) -> dict[str, Any]:
        return next((run.config for run in self.runs if run.config), {})

    @property
    def recipe(self) -> dict[str, Any]:
        """Recipe of the arm's first run that has one; {} without any."""
        return next((run.recipe for run in self.runs if run.recipe), {})

    @property
    def trouble(self) -> str:
        """Status of the runs that did not finish: `diverged`, `diverged, failed` or empty."""
        return ", ".join(dict.fromkeys(run.status for run in self.runs if run.status != "ok"))

    def stat(self, quantity: Quantity) -> Stat | None:
        """Returns the values of a quantity in the counted runs that have it; None without any."""
        values = [v for run in self.counted if (v := finite(quantity.of(run))) is not None]
        return Stat(tuple(values)) if values else None

    def mean(self, quantity: Quantity) -> float | None:
        stat = self.stat(quantity)
        return stat.mean if stat else None

    @property
    def unmeasured(self) -> str:
        """Reason why a quantity of the arm is missing, in words: not measured, or the status of its runs."""
        return "not measured" if self.finished else self.trouble


def arms_of(runs: Sequence[RunResult]) -> list[Arm]:
    """Returns an arm for each name among the runs, in the order in which the names first appear."""
    gathered: dict[str, list[RunResult]] = {}
    for run in runs:
        gathered.setdefault(run.name, []).append(run)
    return [Arm(index, name, tuple(own)) for index, (name, own) in enumerate(gathered.items())]


def ranked(arms: Sequence[Arm]) -> list[Arm]:
    """Returns the arms sorted by mean validation loss, lowest first; arms without one, or unfinished, come last."""

    def key(arm: Arm) -> tuple[bool, float]:
        loss = arm.mean(LOSS)
        return (not arm.finished or loss is None, loss if loss is not None else math.inf)

    return sorted(arms, key=key)


@dataclass(frozen=True)
class RecordedDynamics:
    """Statistics that were recorded while one run trained. `layers[statistic][i][j]` is the value in window i (steps up
    to `steps[i]`) and row j; the `depth` layers of the model are spread evenly over the rows.

    A value is a number, a word for a number that is not finite, or anything else for a missing value."""

    run: RunResult
    steps: list[float]
    depth: int
    layers: dict[str, list[list[Any]]]
    curves: dict[str, Points]
    events: list[dict[str, Any]]
    left_out: int
    experts: dict[int, list[float]]
    """Load of the experts towards the end of the run, by layer: the share of the layer's assignments of each expert."""

    @property
    def rows(self) -> int:
        """Largest number of rows, which are layers or groups of them, of any statistic."""
        return max((len(column) for grid in self.layers.values() for column in grid), default=0)


def watched(run: RunResult) -> RecordedDynamics | None:
    """Returns the recorded dynamics of a run, cut to the limits of this module, without unreadable values; None if none
    were recorded."""
    seen = run.dynamics
    steps: list[float] = []
    for ended in seen.steps[:MOST_STEPS]:
        if ended < 0 or ended > 1e15 or (steps and ended <= steps[-1]):
            break
        steps.append(float(ended))
    layers = {name: [column[:MOST_ROWS] for column in grid[: len(steps)]] for name, grid in seen.layers.items()}
    curves = {name: points(curve[:MOST_STEPS]) for name, curve in seen.curves.items()}
    events = [{**event, "step": step} for event in seen.events
              if (step := finite(event.get("step"))) is not None and abs(step) <= 1e15]  # fmt: skip
    found = RecordedDynamics(run, steps, 0, layers, curves, events[:MOST_STEPS], seen.events_left_out, _loads(seen))
    if not found.rows and not events and not any(curves.values()):
        return None
    return replace(found, depth=max(found.rows, min(seen.depth, 1_000_000)))


def _loads(seen: Dynamics) -> dict[int, list[float]]:
    """Returns the loads of all experts of a layer, scaled to the sum 1, by layer; a layer with an invalid load, a
    single expert or too many experts is left out."""
    found = {}
    for one in seen.experts[:MOST_ROWS]:
        load = [finite(share) for share in one.load[: MOST_EXPERTS + 1]]
        known = [share for share in load if share is not None and share >= 0]
        if 1 < len(known) == len(load) <= MOST_EXPERTS and 0 < sum(known) < 1e9:
            found[min(one.layer, 1_000_000)] = [share / sum(known) for share in known]
    return found


def training_curve(run: RunResult) -> Points:
    """Returns the curve of a run's training loss, points (tokens, nats per token); [] without one."""
    return points(run.train.curve) if run.train else []


def validation_curve(run: RunResult) -> Points:
    """Returns the curve of a run's held-out loss in training, points (tokens, nats per token); [] without one."""
    return points(run.train.validation_curve) if run.train else []


def held_out_tokens(runs: Sequence[RunResult]) -> tuple[str, str]:
    """Returns (number of held-out tokens of the loss after training, that of each validation in training) as texts,
    with a range if runs differ; a text is empty if the number is unknown."""
    final = sorted({run.validation.tokens for run in runs if run.validation})
    while_training = sorted({n for run in runs if run.train and (n := run.train.validation_tokens) is not None})
    return _counts(final), _counts(while_training)


def _counts(known: list[int]) -> str:
    """Returns sorted counts as text: `39,872` for a single one, else first and last, `16,384 to 39,872`."""
    return " to ".join(f"{n:,}" for n in dict.fromkeys(known[:1] + known[-1:]))


def last_seen(run: RunResult) -> tuple[float, float] | None:
    """Returns the last point (tokens, loss) of a run's training curve; None without a curve."""
    curve = training_curve(run)
    return curve[-1] if curve else None
