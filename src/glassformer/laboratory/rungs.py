"""Results of a ladder: its arms, the verdicts between them, the effects of a factorial design."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, Self

import numpy as np

from glassformer.comparison.design import LEAST_SEEDS
from glassformer.comparison.terms import terms
from glassformer.figures.plain import plain
from glassformer.files import SCHEMAS
from glassformer.runs.arms import PARAMETERS, PEAK_MEMORY, STATE_BYTES, TRAINING_SPEED, Arm
from glassformer.runs.contrasts import mean_interval
from glassformer.runs.effects import Effect, by_chance, effects
from glassformer.runs.results import Results, RunResult, Verdict
from glassformer.runs.verdicts import Table, verdicts
from glassformer.thresholds import CONFIDENCE

Kind = Literal["ladder", "factorial"]


@dataclass(frozen=True)
class Rung:
    """An arm of a ladder, described by the changes of the base that it has."""

    name: str
    has: tuple[bool, ...]

    def label(self, steps: Sequence[str]) -> str:
        """Returns the rung's changes as text: `rope`, `rope, rmsnorm`; `nothing` for the base."""
        return ", ".join(step for step, has in zip(steps, self.has, strict=True) if has) or "nothing"


@dataclass(frozen=True)
class LadderArm:
    """Measured results of a ladder's arm: its loss, the interval of the mean, and its costs; None for a value that no
    run has."""

    name: str
    label: str
    """Changes of the arm, as text."""
    has: tuple[bool, ...]
    losses: tuple[float, ...]
    """Held-out loss of each finished seed."""
    loss: float | None
    low: float | None
    high: float | None
    trouble: str
    """Numbers of runs that diverged or failed, as text."""
    learning_rate: float | None
    parameters: float | None
    tokens_per_second: float | None
    peak_memory_bytes: float | None
    state_bytes_per_token: float | None

    @classmethod
    def of(cls, at: int, rung: Rung, steps: Sequence[str], runs: Sequence[RunResult]) -> Self:
        """Makes the results of a rung's arm from its runs."""
        mine = [run for run in runs if run.name == rung.name]
        losses = tuple(run.validation.loss for run in mine if run.status == "ok" and run.validation is not None)
        low = high = None
        if len(losses) > 1:
            _, low, high = mean_interval(losses, CONFIDENCE)
        arm = Arm(at, rung.name, tuple(mine))
        rates = {run.train.learning_rate for run in mine if run.train is not None}
        return cls(
            rung.name, rung.label(steps), rung.has, losses, fmean(losses) if losses else None, low, high, arm.trouble,
            next(iter(rates), None), *(arm.mean(one) for one in COSTS.values()),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Returns the arm as plain values, with its costs under the names of results.json."""
        return {COSTS[name].name if name in COSTS else name: value for name, value in plain(self).items()}


COSTS = {
    "parameters": PARAMETERS, "tokens_per_second": TRAINING_SPEED, "peak_memory_bytes": PEAK_MEMORY,
    "state_bytes_per_token": STATE_BYTES,
}  # fmt: skip
"""Costs of an arm by their names in results.json: the last fields of `LadderArm`."""


@dataclass(frozen=True)
class LadderPair:
    """Two arms of a ladder, by index, with the verdict between them: `b` has a change that `a` lacks; None if too few
    seeds finished."""

    a: int
    b: int
    verdict: Verdict | None

    def to_dict(self) -> dict[str, Any]:
        return {"a": self.a, "b": self.b, "verdict": None if self.verdict is None else self.verdict.to_dict()}


@dataclass(frozen=True, kw_only=True)
class LadderRecord:
    """Content of ladder.json.

    Attributes
    ----------
    base, target
        Models at the ends.
    command
        Command that repeats the ladder.
    design
        "ladder" or "factorial".
    changes
        Changes from the base to the target, in their order.
    created, data
        Date of the first run; name of the text.
    confidence, seeds, tuned
        Confidence of the intervals; runs of each arm; True if each arm has its own learning rate.
    notes, terms
        Remarks on fairness; size, budget and text of the verdicts in words.
    arms : tuple of LadderArm
        The base first.
    verdicts : tuple of Verdict
        Verdicts between arms, with intervals that hold together; empty for a factorial design.
    pairs
        Pairs of arms by what they show: "base", each rung against the base; "before", against the rung before; "last",
        the target against the target without one change.
    effects : tuple of Effect
        Effects of changes and of two together, of a factorial design.
    whole_seeds
        Seeds that every arm finished, of a factorial design.
    by_chance
        Share of interactions beyond two standard errors by chance; None without effects.
    """

    base: str
    target: str
    command: str
    design: Kind
    changes: tuple[str, ...]
    created: str
    data: str | None
    confidence: float
    seeds: int | None
    tuned: bool
    notes: tuple[str, ...]
    arms: tuple[LadderArm, ...]
    terms: str
    verdicts: tuple[Verdict, ...] = ()
    pairs: Mapping[str, tuple[LadderPair, ...]]
    effects: tuple[Effect, ...] = ()
    whole_seeds: int = 0
    by_chance: float | None = None

    @classmethod
    def of(
        cls, results: Results, rungs: Sequence[Rung], steps: Sequence[str], kind: Kind, ends: Mapping[str, Any],
        **more: Any,
    ) -> Self:  # fmt: skip
        """Makes the content of ladder.json from the results of all arms."""
        own = {name: rung for rung, name in trained_as(results, [rung.name for rung in rungs]).items()}
        runs = [run.changed(name=own[run.name]) for run in results.paced if run.name in own]
        found = _effects(rungs, runs) if kind == "factorial" else _verdicts(rungs, runs, results)
        return cls(
            **ends, design=kind, changes=tuple(steps), created=results.created, data=results.data.name,
            confidence=CONFIDENCE, seeds=results.budget.seeds, tuned=results.tuning is not None,
            notes=tuple(results.budget.notes),
            arms=tuple(LadderArm.of(at, rung, steps, runs) for at, rung in enumerate(rungs)),
            terms=terms(results.changed(runs=runs), runs, [rungs[0].name]), **found, **more,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of ladder.json."""
        told: dict[str, Any] = {
            "schema": SCHEMAS["ladder"], "base": self.base, "target": self.target, "command": self.command,
            "design": self.design, "changes": list(self.changes), "created": self.created, "data": self.data,
            "confidence": self.confidence, "seeds": self.seeds, "tuned": self.tuned, "notes": list(self.notes),
            "arms": [arm.to_dict() for arm in self.arms], "terms": self.terms,
        }  # fmt: skip
        if self.design == "ladder":
            pairs = {key: [pair.to_dict() for pair in some] for key, some in self.pairs.items()}
            return told | {"verdicts": [one.to_dict() for one in self.verdicts], "pairs": pairs}
        found = [{**plain(one), "shown": one.shown, "noticed": one.noticed} for one in self.effects]
        chance = {} if self.by_chance is None else {"by_chance": self.by_chance}
        return told | {"effects": found, "whole_seeds": self.whole_seeds} | chance


def trained_as(results: Results, names: Sequence[str]) -> dict[str, str]:
    """Returns {arm: name under which it was trained}, which includes a tuned learning rate."""
    tuned = {one.name: one.tuned_as for one in results.tuning.arms} if results.tuning is not None else {}
    return {name: tuned.get(name, name) for name in names}


def pairs_of(rungs: Sequence[Rung]) -> dict[str, list[tuple[int, int]]]:
    """Returns the pairs of arms to compare, by kind, the arm with fewer changes first: `base`, every rung against the
    base; `before`, against the previous one; `last`, the target against itself without one change."""
    places = {rung.has: at for at, rung in enumerate(rungs)}
    many = len(rungs[0].has)
    added = [places[tuple(at < count for at in range(many))] for count in range(many + 1)]
    without = [places[tuple(at != gone for at in range(many))] for gone in range(many)]
    return {
        "base": [(added[0], at) for at in added[1:]],
        "before": list(pairwise(added)),
        "last": [(at, added[-1]) for at in without],
    }


def _verdicts(rungs: Sequence[Rung], runs: Sequence[RunResult], results: Results) -> dict[str, Any]:
    pairs = pairs_of(rungs)
    family = list(dict.fromkeys(pair for some in pairs.values() for pair in some))
    looks = sorted({*results.looks, *results.planned_looks})
    found = verdicts(runs, [(rungs[a].name, rungs[b].name) for a, b in family], looks=looks)
    by = {(one.a, one.b): one for one in found}
    return {
        "verdicts": tuple(found),
        "pairs": {
            key: tuple(LadderPair(a, b, by.get((rungs[a].name, rungs[b].name))) for a, b in some)
            for key, some in pairs.items()
        },
    }


def _effects(rungs: Sequence[Rung], runs: Sequence[RunResult]) -> dict[str, Any]:
    """Returns the fields of a factorial `LadderRecord`, with effects over the seeds that every arm finished, or without
    effects if fewer than two such seeds exist."""
    names = [rung.name for rung in rungs]
    losses = Table.of(runs, [(names[0], name) for name in names[1:]]).columns(names)
    whole = losses[np.isfinite(losses).all(1)]
    if len(whole) < LEAST_SEEDS:
        return {"pairs": {}, "whole_seeds": len(whole)}
    found = effects(whole, [rung.has for rung in rungs], CONFIDENCE)
    return {"pairs": {}, "effects": tuple(found), "whole_seeds": len(whole), "by_chance": by_chance(found[0].df)}
