"""results.json as it really is: keys missing, numbers NaN, several runs that are seeds of one arm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..figures import finite

Points = list[tuple[float, float]]


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
        return next((c for run in self.runs if (c := mapping(run.get("config")))), {})

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


def last_seen(run: dict[str, Any]) -> tuple[float, float] | None:
    """The last (tokens, loss) that a run recorded."""
    curve = points(dig(run, "train.curve"))
    return curve[-1] if curve else None
