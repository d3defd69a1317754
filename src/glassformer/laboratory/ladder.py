"""Ladders: what each of the changes between two models does, one at a time in both directions, or by factorial design.

OUT/              a comparison of all arms, or a tuned one: it resumes and takes more seeds
OUT/ladder.json   the rungs with losses, differences and costs
OUT/ladder.html   the same, drawn
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from glassformer.comparison import compare
from glassformer.comparison.command import command_of
from glassformer.comparison.request import (
    arms,
    check_seeds,
    common_context,
    fairness,
    recipe_defaults,
    recipes,
)
from glassformer.comparison.terms import terms
from glassformer.errors import RequestError, WorkError
from glassformer.files import SCHEMAS, replace_text
from glassformer.laboratory.paces import paces_of
from glassformer.laboratory.steps import Point, as_steps, between, check_steps, join
from glassformer.laboratory.tuning import tune as tuned
from glassformer.report.ladder import write_ladder
from glassformer.runs.arms import PARAMETERS, PEAK_MEMORY, STATE_BYTES, TRAINING_SPEED, Arm
from glassformer.runs.contrasts import mean_interval
from glassformer.runs.effects import MOST, by_chance, combined, effects
from glassformer.runs.events import Notify, StageEvent, silent
from glassformer.runs.executor import Executor
from glassformer.runs.files import read_results
from glassformer.runs.results import Results, RunResult
from glassformer.runs.verdicts import Table, verdicts
from glassformer.text import OnProgress, TextData
from glassformer.thresholds import CONFIDENCE
from glassformer.training import Interrupted

Design = Literal["ladder", "factorial"]
RESULTS, PAGE = "ladder.json", "ladder.html"
LEAST_SEEDS = 2
"""Of a difference: one seed has no interval."""
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


def ablate(
    base: str,
    data: str | Path | TextData,
    to: str | None = None,
    tokens: int | None = None,
    minutes: float | None = None,
    seeds: int = 3,
    design: Design = "ladder",
    changes: str | Sequence[str] | None = None,
    tune: bool = False,
    within: float | None = None,
    out: str | Path = "ladder",
    tokenizer: str = "auto",
    allow_unmatched: bool = False,
    on_event: Notify | None = None,
    on_progress: OnProgress | None = None,
    command: str | None = None,
    executor: Executor | None = None,
    **recipe: Any,
) -> dict[str, Any]:
    """Trains what lies between `base` and `to` and says what each change does; returns the content of ladder.json.

    to       the model at the other end; the changes that lead to it are found, unless `changes` names them
    changes  in their order, as `rope,rmsnorm,swiglu` or as a list; without `to`, they make the target
    design   "ladder": the changes added one after the other from the base, and each left out of the target alone;
             every rung against the base and against the one before. "factorial": arms with every combination of up to
             four changes, or half of those of five: effects, and interactions of two
    tune     every arm gets its own learning rate first, as in `tune`; `within` minutes, as there
    all else as in `compare`

    The intervals of all differences of a ladder hold together. Raises RequestError before anything is trained, for
    ends that are the same model, a change that does nothing at its place, models that no known change leads between,
    and a budget of fewer than LEAST_STEPS steps; WorkError where a run failed, after the page is written.
    """
    if check_seeds(seeds) < LEAST_SEEDS:
        message = f"seeds={seeds} gives no interval; a ladder needs --seeds {LEAST_SEEDS} or more, by default 3"
        raise RequestError(message, code="range", field="seeds", value=seeds, expected=f"at least {LEAST_SEEDS}")
    if within is not None and not tune:
        message = "--within is for --tune, which is not given"
        raise RequestError(message, code="conflict", field="within", value=within, expected="--tune beside it")
    found, target = _steps(base, to, changes)
    rungs = _rungs(base, found, design)
    names = [rung.name for rung in rungs]
    budget = {"tokens": tokens, "minutes": minutes}
    fields = {**recipe_defaults(), "context": None, **recipe, **budget, "flops": None}
    _refuse_small(names, fields, allow_unmatched)
    notify = on_event or silent
    for words in (f"{len(found)} changes: {', '.join(found)}", _announced(len(rungs), seeds, minutes, tune)):
        notify(StageEvent(words=words))
    given: dict[str, Any] = {**recipe, **budget, "tokenizer": tokenizer, "allow_unmatched": allow_unmatched}
    said = command or _call(
        base, data, given, to=to, changes=changes, design=design, tune=tune, seeds=seeds, out=str(out)
    )
    work: Any = tuned if tune else compare
    more: dict[str, Any] = {"within": within} if tune else {}
    ends = {"base": base, "target": target, "command": said}
    try:
        results = Results.of(
            work(names, data, seeds=seeds, out=out, on_event=notify, on_progress=on_progress, command=said,
                 executor=executor, **given, **more)
        )  # fmt: skip
    except WorkError as error:  # of --tune, which gives no results then
        held = read_results(Path(out))
        if isinstance(error, Interrupted) or held is None or held.tuning is None:
            raise
        _write(_told(held, rungs, found, design, ends), Path(out))
        raise WorkError(f"{error}; what there is of the ladder is in {Path(out) / PAGE}", code=error.code) from None
    told = _told(results, rungs, found, design, ends)
    if executor is not None and executor.workers > 1:
        notify(StageEvent(words="training speeds, a few steps of each model in turn"))
        _with_paces(told, results, Path(out))
    _write(told, Path(out))
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


def _steps(base: str, to: str | None, given: str | Sequence[str] | None) -> tuple[list[str], str]:
    """(the steps, the target). Raises RequestError."""
    asked = None if given is None else as_steps(given)
    if to is not None:
        return between(base, to, asked), to
    if asked is None:
        message = "a ladder needs its other end: give --to MODEL, or --changes rope,rmsnorm,..."
        raise RequestError(message, code="missing", field="to", expected="a model such as llama@1m")
    check_steps(base, asked)
    return asked, join(base, asked)


def _rungs(base: str, steps: Sequence[str], kind: Design) -> list[Rung]:
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


def _refuse_small(names: Sequence[str], fields: dict[str, Any], allow_unmatched: bool) -> None:
    """Raises RequestError for arms of different size, and for a budget of too few steps."""
    configs = arms(names)
    fairness(configs, allow_unmatched, "minutes" if fields["minutes"] is not None else None)
    fields = {**fields, "context": common_context(configs, fields.get("context"))}
    plans = recipes(configs, fields, None, vocab_size=1)
    plan = plans[names[0]]
    count = plan.num_steps(configs[names[0]])
    if count is not None and count < LEAST_STEPS:
        least = LEAST_STEPS * plan.tokens_per_step
        raise RequestError(
            f"--tokens {fields['tokens']} are {count} steps, which say nothing of a change: give {least:,} or more",
            code="range", field="tokens", value=fields["tokens"], expected=f"at least {least}",
        )  # fmt: skip


def _announced(many: int, seeds: int, minutes: float | None, tune: bool) -> str:
    told = f"{many} arms x {seeds} seeds: {many * seeds} runs"
    if minutes is not None:
        told += f", {many * seeds * minutes:.3g} minutes of training"
    return told + (", and those that choose the learning rates" if tune else "")


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
    results: Results, rungs: Sequence[Rung], steps: Sequence[str], kind: Design, ends: dict[str, str]
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
    found = paces_of(done, folder) if done else {}
    trained_as = {one.name: one.tuned_as for one in results.tuning.arms} if results.tuning is not None else {}
    for arm in told["arms"]:
        arm[TRAINING_SPEED.name] = found.get(trained_as.get(arm["name"], arm["name"]))
    said = "Runs were trained side by side; speeds are those of a few steps of each model, one after the other."
    told["notes"] = [*told["notes"], said]


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


def _call(base: str, data: object, given: dict[str, Any], **ladder: Any) -> str:
    """The command, or the call in Python, that repeats this."""
    told = command_of([base], data, given, seeds=ladder["seeds"], out=ladder["out"])
    changes = ladder["changes"]
    words = {
        "to": ladder["to"],
        "changes": changes if changes is None or isinstance(changes, str) else ",".join(changes),
        "design": None if ladder["design"] == "ladder" else ladder["design"],
    }
    asked = {key: value for key, value in words.items() if value is not None}
    if told.startswith("glassformer compare"):
        options = "".join(f" --{key} {shlex.quote(str(value))}" for key, value in asked.items())
        return told.replace(" compare", " ablate", 1) + options + " --tune" * ladder["tune"]
    keywords = [f"{key}={value!r}" for key, value in {**asked, **({"tune": True} if ladder["tune"] else {})}.items()]
    told = told.replace(f"gf.compare({[base]!r}", f"gf.ablate({base!r}", 1)
    return told.replace("seeds=", "".join(f"{word}, " for word in keywords) + "seeds=", 1)
