"""Ladders: what each of the changes between two models does, one at a time in both directions, or by factorial design.

OUT/              a comparison of all arms, or a tuned one: it resumes and takes more seeds
OUT/ladder.json   the rungs with losses, differences and costs
OUT/ladder.html   the same, drawn
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self

import numpy as np

from glassformer.comparison.arms import check_seeds
from glassformer.comparison.design import FILE, LEAST_SEEDS, Design, from_tree, to_yaml
from glassformer.comparison.experiment import command_of
from glassformer.comparison.terms import terms
from glassformer.comparison.verbs import begun, place_of_work
from glassformer.config import ModelConfig
from glassformer.errors import RequestError, WorkError
from glassformer.files import SCHEMAS, replace_text
from glassformer.laboratory.steps import Point, as_steps, between, check_steps, join
from glassformer.report.ladder import write_ladder
from glassformer.runs.arms import PARAMETERS, PEAK_MEMORY, STATE_BYTES, TRAINING_SPEED, Arm
from glassformer.runs.contrasts import mean_interval
from glassformer.runs.effects import MOST, by_chance, combined, effects
from glassformer.runs.events import Notify, StageEvent
from glassformer.runs.executor import Executor
from glassformer.runs.files import read_results
from glassformer.runs.live import shown
from glassformer.runs.request import place_of, read_request
from glassformer.runs.results import Results, RunResult
from glassformer.runs.verdicts import Table, verdicts
from glassformer.text import DataLike, Tokens, named_or_read
from glassformer.thresholds import CONFIDENCE
from glassformer.training import Interrupted, Recipe
from glassformer.training.pace import StepPace, paces

VERB = "ablate"
Kind = Literal["ladder", "factorial"]
RESULTS, PAGE = "ladder.json", "ladder.html"
LADDER_SEEDS = 3
"""Seeds of a ladder, by default."""
LEAST_STEPS = 10
"""Optimizer steps of a run: before them every model is still near its initial weights."""


@dataclass(frozen=True)
class Rung:
    """An arm: the base with some of the steps."""

    name: str
    has: tuple[bool, ...]

    def label(self, steps: Sequence[str]) -> str:
        """`rope`, `rope, rmsnorm`; `nothing` for the base."""
        return ", ".join(step for step, has in zip(steps, self.has, strict=True) if has) or "nothing"


@dataclass(frozen=True, kw_only=True)
class LadderDesign:
    """A ladder that is asked for: its ends, its arms, and the comparison of these."""

    base: str
    to: str | None
    changes: tuple[str, ...] | None
    """Changes that were asked for, or None if they were to be found."""
    kind: Kind
    steps: list[str]
    target: str
    rungs: list[Rung]
    comparison: Design

    @classmethod
    def of(
        cls,
        base: str | Path,
        data: str | Path | None = None,
        *,
        to: str | Path | None = None,
        changes: str | Sequence[str] | None = None,
        design: Kind = "ladder",
        seeds: int | None = None,
        **options: Any,
    ) -> Self:
        """Takes what `ablate` takes. Raises RequestError."""
        seeds = LADDER_SEEDS if seeds is None else check_seeds(seeds)
        if seeds < LEAST_SEEDS:
            message = f"seeds={seeds} gives no interval; a ladder needs --seeds {LEAST_SEEDS} or more, by default 3"
            raise RequestError(message, code="range", field="seeds", value=seeds, expected=f"at least {LEAST_SEEDS}")
        base, to = str(base), None if to is None else str(to)
        asked = None if changes is None else as_steps(changes)
        steps, target = _steps(base, to, asked)
        rungs = _rungs(base, steps, design)
        comparison = Design.of([rung.name for rung in rungs], data, seeds=seeds, **options)
        _refuse_small(comparison)
        return cls(
            base=base, to=to, changes=None if asked is None else tuple(asked), kind=design, steps=steps, target=target,
            rungs=rungs, comparison=comparison,
        )  # fmt: skip

    @property
    def data(self) -> str | None:
        return self.comparison.data

    def vary(self, **changes: Any) -> Self:
        """Returns the ladder with some fields of its comparison changed. Raises RequestError."""
        return replace(self, comparison=self.comparison.vary(**changes))

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain values: the content of design.yaml."""
        asked = {
            "to": self.to, "changes": None if self.changes is None else list(self.changes),
            "design": None if self.kind == "ladder" else self.kind,
        }  # fmt: skip
        rest = self.comparison.to_dict()
        del rest["models"]
        ends = {"base": self.base} | {name: value for name, value in asked.items() if value is not None}
        return rest | {"verb": VERB, "seeds": self.comparison.seeds} | ends

    def save(self, folder: Path) -> None:
        """Writes design.yaml into the folder."""
        replace_text(folder / FILE, to_yaml(self.to_dict()))

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], where: str = "") -> Self:
        """Makes a ladder from plain values. Raises RequestError."""
        return from_tree(tree, VERB, where, cls.of)


def ablate(
    base: str | Path | LadderDesign,
    data: DataLike | None = None,
    *,
    to: str | Path | None = None,
    changes: str | Sequence[str] | None = None,
    design: Kind = "ladder",
    seeds: int | None = None,
    out: str | Path | None = None,
    executor: Executor | None = None,
    progress: bool | Notify = True,
    command: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains what lies between `base` and `to` and says what each change does; returns the content of ladder.json.

    base     the first model; or a `LadderDesign`
    data     as in `compare`
    to       the model at the other end; the changes that lead to it are found, unless `changes` names them
    changes  in their order, as `rope,rmsnorm,swiglu` or as a list; without `to`, they make the target
    design   "ladder": the changes added one after the other from the base, and each left out of the target alone;
             every rung against the base and against the one before. "factorial": arms with every combination of up to
             four changes, or half of those of five: effects, and interactions of two
    all else as in `compare`; `seeds` is 3 by default

    The intervals of all differences of a ladder hold together. Raises RequestError before anything is trained, for
    ends that are the same model, a change that does nothing at its place, models that no known change leads between,
    and a budget of fewer than LEAST_STEPS steps; WorkError where a run failed, after the page is written.
    """
    name, text = named_or_read(data, options.get("tokenizer"))
    if isinstance(base, LadderDesign):
        ladder = base.vary(**options) if options else base
    else:
        ladder = LadderDesign.of(base, name, to=to, changes=changes, design=design, seeds=seeds, **options)
    with shown(progress) as notify, place_of_work(out) as place:
        return _trained(ladder, text, Path(place), notify, executor, command)


def _trained(
    ladder: LadderDesign,
    text: Tokens | None,
    out: Path,
    notify: Notify,
    executor: Executor | None,
    command: str | None,
) -> dict[str, Any]:
    rungs, found, kind, design = ladder.rungs, ladder.steps, ladder.kind, ladder.comparison
    for words in (f"{len(found)} changes: {', '.join(found)}", _announced(len(rungs), design)):
        notify(StageEvent(words=words))
    said = command or command_of(ladder, out)
    ends = {"base": ladder.base, "target": ladder.target, "command": said}
    try:
        made = begun(design, text, out, executor=executor, progress=notify, command=said, origin=ladder)
    except WorkError as error:  # of --tune, which gives no results then
        held = read_results(out)
        if isinstance(error, Interrupted) or held is None or held.tuning is None:
            raise
        _write(_told(held, rungs, found, kind, ends), out)
        raise WorkError(f"{error}; what there is of the ladder is in {out / PAGE}", code=error.code) from None
    results = made.results
    told = _told(results, rungs, found, kind, ends)
    if executor is not None and executor.workers > 1:
        notify(StageEvent(words="training speeds, a few steps of each model in turn"))
        _with_paces(told, results, out)
    _write(told, out)
    if failed := [run for run in results.runs if run.status == "failed"]:
        raise WorkError(
            f"{len(failed)} of {len(results.runs)} runs failed: {failed[0].name} seed {failed[0].seed}: "
            f"{failed[0].error}; what is finished is in {out}, and the same command goes on from here",
            code="failed",
        )  # fmt: skip
    return told


def _write(told: dict[str, Any], folder: Path) -> None:
    replace_text(folder / RESULTS, json.dumps(told, indent=1, allow_nan=False))
    write_ladder(told, folder / PAGE)


def _steps(base: str, to: str | None, asked: list[str] | None) -> tuple[list[str], str]:
    """(the steps, the target). Raises RequestError."""
    if to is not None:
        return between(base, to, asked), to
    if asked is None:
        message = "a ladder needs its other end: give --to MODEL, or --changes rope,rmsnorm,..."
        raise RequestError(message, code="missing", field="to", expected="a model such as llama@1m")
    check_steps(base, asked)
    return asked, join(base, asked)


def _rungs(base: str, steps: Sequence[str], kind: Kind) -> list[Rung]:
    """The arms of the design, the base first. Raises RequestError for too few or too many steps, and for two arms that
    are the same model."""
    many = len(steps)
    if kind == "factorial":
        if not 2 <= many <= MOST:
            raise RequestError(
                f"a factorial design takes 2 to {MOST} changes, and here are {many}: {', '.join(steps)}; "
                "use --design ladder, or other --changes",
                code="range", field="design", value=kind, expected=f"2 to {MOST} changes",
            )  # fmt: skip
        rows = combined(many)
    else:
        added = [tuple(at < count for at in range(many)) for count in range(many + 1)]
        left_out = [tuple(at != gone for at in range(many)) for gone in range(many)]
        rows = list(dict.fromkeys([*added, *left_out]))
    rungs = [Rung(join(base, [s for s, has in zip(steps, row, strict=True) if has]), row) for row in rows]
    points: dict[Point, Rung] = {}
    for rung in rungs:
        twin = points.setdefault(Point.of(rung.name), rung)
        if twin is not rung:
            raise RequestError(
                f"{twin.name} and {rung.name} are the same model, so a change does nothing there; use other --changes",
                code="conflict", field="changes", value=rung.label(steps), expected="changes that each do something",
            )  # fmt: skip
    return rungs


def _refuse_small(design: Design) -> None:
    """Raises RequestError for a budget of too few steps."""
    name = design.arms[0].name
    plan = design.plans(design.configs, vocab_size=1)[name]
    count = plan.num_steps(design.configs[name])
    if count is not None and count < LEAST_STEPS:
        least, asked = LEAST_STEPS * plan.tokens_per_step, design.amounts["tokens"]
        raise RequestError(
            f"--tokens {asked} are {count} steps, which say nothing of a change: give {least:,} or more",
            code="range", field="tokens", value=asked, expected=f"at least {least}",
        )  # fmt: skip


def _announced(many: int, design: Design) -> str:
    told = f"{many} arms x {design.seeds} seeds: {many * design.seeds} runs"
    if design.minutes is not None:
        told += f", {many * design.seeds * design.minutes:.3g} minutes of training"
    return told + (", and those that choose the learning rates" if design.tune else "")


# What was found


def pairs_of(rungs: Sequence[Rung]) -> dict[str, list[tuple[int, int]]]:
    """Pairs of arms by what they show, the one with fewer changes first: `base`, every rung against the base; `before`,
    against the one before; `last`, the target against itself without one change."""
    places = {rung.has: at for at, rung in enumerate(rungs)}
    many = len(rungs[0].has)
    added = [places[tuple(at < count for at in range(many))] for count in range(many + 1)]
    without = [places[tuple(at != gone for at in range(many))] for gone in range(many)]
    return {
        "base": [(added[0], at) for at in added[1:]],
        "before": list(pairwise(added)),
        "last": [(at, added[-1]) for at in without],
    }


def _told(
    results: Results, rungs: Sequence[Rung], steps: Sequence[str], kind: Kind, ends: dict[str, str]
) -> dict[str, Any]:
    trained_as = {one.name: one.tuned_as for one in results.tuning.arms} if results.tuning is not None else {}
    own = {trained_as.get(rung.name, rung.name): rung.name for rung in rungs}
    runs = [run.changed(name=own[run.name]) for run in results.runs if run.name in own]
    named = results.changed(runs=runs)
    told: dict[str, Any] = {
        "schema": SCHEMAS["ladder"], **ends, "design": kind,
        "changes": list(steps), "created": results.created, "data": results.data.name,
        "confidence": CONFIDENCE, "seeds": results.budget.seeds, "tuned": results.tuning is not None,
        "notes": results.budget.notes, "arms": [_arm(at, rung, steps, runs, results) for at, rung in enumerate(rungs)],
        "terms": terms(named, runs, [rungs[0].name]),
    }  # fmt: skip
    if kind == "factorial":
        return {**told, **_effects(rungs, runs)}
    pairs = pairs_of(rungs)
    family = list(dict.fromkeys(pair for some in pairs.values() for pair in some))
    looks = sorted({*results.looks, *results.planned_looks})
    found = verdicts(runs, [(rungs[a].name, rungs[b].name) for a, b in family], looks=looks)
    by_pair = {(one.a, one.b): one.to_dict() for one in found}
    return {
        **told,
        "verdicts": list(by_pair.values()),
        "pairs": {
            key: [{"a": a, "b": b, "verdict": by_pair.get((rungs[a].name, rungs[b].name))} for a, b in some]
            for key, some in pairs.items()
        },
    }


def _arm(at: int, rung: Rung, steps: Sequence[str], runs: Sequence[RunResult], results: Results) -> dict[str, Any]:
    """Loss with the interval of its mean, and costs."""
    mine = [run for run in runs if run.name == rung.name]
    losses = [run.validation.loss for run in mine if run.status == "ok" and run.validation is not None]
    low = high = None
    if len(losses) > 1:
        _, low, high = mean_interval(losses, CONFIDENCE)
    arm = Arm(at, rung.name, tuple(mine))
    costs = (PARAMETERS, TRAINING_SPEED, PEAK_MEMORY, STATE_BYTES)
    rates = {run.train.learning_rate for run in mine if run.train is not None}
    return {
        "name": rung.name, "label": rung.label(steps), "has": list(rung.has), "losses": losses,
        "loss": fmean(losses) if losses else None, "low": low, "high": high, "trouble": arm.trouble,
        "learning_rate": next(iter(rates), None), **{one.name: arm.mean(one) for one in costs},
    }  # fmt: skip


def _with_paces(told: dict[str, Any], results: Results, folder: Path) -> None:
    """The speeds of runs that were trained side by side give way to those of steps in turn."""
    done = [run for run in results.runs if run.status != "failed"]
    found = _paces(done, folder) if done else {}
    trained_as = {one.name: one.tuned_as for one in results.tuning.arms} if results.tuning is not None else {}
    for arm in told["arms"]:
        pace = found.get(trained_as.get(arm["name"], arm["name"]))
        arm[TRAINING_SPEED.name] = None if pace is None else pace.tokens_per_second
    said = "Runs were trained side by side; speeds are those of a few steps of each model, one after the other."
    told["notes"] = [*told["notes"], said]


def _paces(runs: Sequence[RunResult], folder: Path) -> dict[str, StepPace]:
    """Returns the pace of each model of a comparison in `folder`, as its first run was trained, with all cores."""
    firsts: dict[str, RunResult] = {}
    for run in runs:
        firsts.setdefault(run.name, run)
    models = {
        name: (ModelConfig.from_dict(run.config), Recipe.of(**run.recipe).vary(threads=None))
        for name, run in firsts.items()
    }
    one = next(iter(firsts.values()))
    return paces(models, Tokens.open(**read_request(place_of(folder, *one.key))["text"]))


def _effects(rungs: Sequence[Rung], runs: Sequence[RunResult]) -> dict[str, Any]:
    """Over the seeds that every arm finished; without two of them, none."""
    names = [rung.name for rung in rungs]
    losses = Table.of(runs, [(names[0], name) for name in names[1:]]).columns(names)
    whole = losses[np.isfinite(losses).all(1)]
    if len(whole) < LEAST_SEEDS:
        return {"effects": [], "whole_seeds": len(whole)}
    found = effects(whole, [rung.has for rung in rungs], CONFIDENCE)
    keys = ("effect", "error", "low", "high", "df", "shown", "noticed")
    told = [{"of": list(one.of), **{key: getattr(one, key) for key in keys}} for one in found]
    return {"effects": told, "whole_seeds": len(whole), "by_chance": by_chance(found[0].df)}
