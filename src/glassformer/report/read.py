"""results.json as it really is: keys missing, numbers NaN, several runs that are seeds of one arm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..figures import finite

Points = list[tuple[float, float]]
MOST_STEPS, MOST_ROWS = 120, 64  # of what was watched: more is not in a file that this package wrote


def mapping(value: object) -> dict[str, Any]:
    """The value if it is a mapping, otherwise an empty one."""
    return value if isinstance(value, dict) else {}


def sequence(value: object) -> list[Any]:
    """The value as a list if it is one, otherwise an empty one."""
    return list(value) if isinstance(value, list | tuple) else []


def dig(tree: object, path: str) -> Any:
    """What lies at a dotted path, or None."""
    for key in path.split("."):
        tree = mapping(tree).get(key)
    return tree


def points(curve: object) -> Points:
    """The finite pairs of a recorded curve, in order."""
    pairs = [(finite(p[0]), finite(p[1])) for p in map(sequence, sequence(curve)) if len(p) == 2]
    return sorted((a, b) for a, b in pairs if a is not None and b is not None)


def why_not(value: object) -> str:
    """Why a value is no number that could be printed."""
    if isinstance(value, float) and math.isnan(value):
        return "not a number"
    if isinstance(value, float) and math.isinf(value):
        return "infinite"
    return "not measured" if value is None else "unreadable"


@dataclass(frozen=True)
class Stat:
    """A quantity over seeds: the mean, and from two seeds on the sample standard deviation."""

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
    """All seeds of one named configuration; `index`, its place in the request, decides its colour."""

    index: int
    name: str
    runs: tuple[dict[str, Any], ...]

    @property
    def finished(self) -> list[dict[str, Any]]:
        """The runs that came to their end."""
        return [run for run in self.runs if run_status(run) == "ok"]

    @property
    def counted(self) -> list[dict[str, Any]]:
        """The runs that figures are taken from: those that finished, or all of them where none did."""
        return self.finished or list(self.runs)

    @property
    def complete(self) -> bool:
        """Whether every seed came to its end."""
        return len(self.finished) == len(self.runs)

    @property
    def config(self) -> dict[str, Any]:
        return self._first("config")

    @property
    def recipe(self) -> dict[str, Any]:
        """How its first run was trained."""
        return self._first("recipe")

    def _first(self, key: str) -> dict[str, Any]:
        return next((found for run in self.runs if (found := mapping(run.get(key)))), {})

    @property
    def trouble(self) -> str:
        """What happened to the runs that did not finish: `diverged`, `diverged, failed` or nothing."""
        return ", ".join(dict.fromkeys(s for run in self.runs if (s := run_status(run)) != "ok"))

    def stat(self, path: str) -> Stat | None:
        """A quantity over the counted runs."""
        values = [v for run in self.counted if (v := finite(dig(run, path))) is not None]
        return Stat(tuple(values)) if values else None

    def mean(self, path: str) -> float | None:
        stat = self.stat(path)
        return stat.mean if stat else None

    def reason(self, path: str) -> str:
        """Why there is no such quantity."""
        said = why_not(next((v for run in self.counted if (v := dig(run, path)) is not None), None))
        return self.trouble if said == "not measured" and not self.finished else said


def run_status(run: dict[str, Any]) -> str:
    """`ok`, `diverged`, `failed`, or what else the run says of itself."""
    said = run.get("status")
    if isinstance(said, str) and said.strip():
        return said.strip()
    return "ok" if finite(dig(run, "validation.loss")) is not None else "unknown"


def arms_of(results: object) -> list[Arm]:
    """The runs gathered by name, in the order in which the names first appear."""
    gathered: dict[str, list[dict[str, Any]]] = {}
    for run in sequence(mapping(results).get("runs")):
        if isinstance(run, dict):
            name = run.get("name")
            gathered.setdefault(str(name) if name not in (None, "") else "unnamed", []).append(run)
    return [Arm(index, name, tuple(runs)) for index, (name, runs) in enumerate(gathered.items())]


def ranked(arms: Sequence[Arm]) -> list[Arm]:
    """Arms by validation loss, lowest first; those in which no run finished come last."""

    def key(arm: Arm) -> tuple[bool, float]:
        loss = arm.mean("validation.loss")
        return (not arm.finished or loss is None, loss if loss is not None else math.inf)

    return sorted(arms, key=key)


@dataclass(frozen=True)
class Watched:
    """What one run recorded of itself: `layers[statistic][i][j]` is of window i, which ends at `steps[i]`, and row j.

    `depth` layers share the rows evenly. A value is a number, a word for one that is not finite, or anything else for
    nothing."""

    run: dict[str, Any]
    steps: list[float]
    depth: int
    layers: dict[str, list[list[Any]]]
    curves: dict[str, Points]
    events: list[dict[str, Any]]
    left_out: int

    @property
    def rows(self) -> int:
        """Rows of layers, in the statistic that has most of them."""
        return max((len(column) for grid in self.layers.values() for column in grid), default=0)


def watched(run: dict[str, Any]) -> Watched | None:
    """The dynamics of a run as far as they can be read, or None where nothing was watched."""
    raw = mapping(run.get("dynamics"))
    steps: list[float] = []
    for step in map(finite, sequence(raw.get("steps"))[:MOST_STEPS]):
        if step is None or step < 0 or step > 1e15 or (steps and step <= steps[-1]):
            break
        steps.append(step)
    layers = {
        str(name): [sequence(column)[:MOST_ROWS] for column in sequence(grid)[: len(steps)]]
        for name, grid in mapping(raw.get("layers")).items()
    }
    curves = {str(name): points(sequence(curve)[:MOST_STEPS]) for name, curve in mapping(raw.get("curves")).items()}
    events = [{**event, "step": step} for event in map(mapping, sequence(raw.get("events")))
              if (step := finite(event.get("step"))) is not None and abs(step) <= 1e15]  # fmt: skip
    depth, left_out = finite(raw.get("depth")), finite(raw.get("events_left_out"))
    found = Watched(run, steps, 0, layers, curves, events[:MOST_STEPS], max(0, int(left_out or 0)))
    if not found.rows and not events and not any(curves.values()):
        return None
    return replace(found, depth=int(max(found.rows, min(depth or 0, 1e6))))


def last_seen(run: dict[str, Any]) -> tuple[float, float] | None:
    """The last (tokens, loss) that a run recorded."""
    curve = points(dig(run, "train.curve"))
    return curve[-1] if curve else None
