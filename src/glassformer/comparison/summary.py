"""Results of a comparison so far: runs, verdicts and notes, and the files that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from glassformer.comparison.looks import look_notes
from glassformer.comparison.power import needed
from glassformer.comparison.request import unequal
from glassformer.comparison.statistics import stand_in, verdicts
from glassformer.comparison.terms import terms
from glassformer.parts.init import WEIGHTS_RULE
from glassformer.report import write_report
from glassformer.runs.files import write_results
from glassformer.runs.results import Budget, Key, Machine, Results, RunResult
from glassformer.training.checkpoint import disk_errors

NAMED = 4
"""Number of runs that a note names."""


def so_far(begun: Results, found: Mapping[Key, RunResult], effect: float | None = None) -> Results:
    """The results with the runs `found`, in the requested order, with verdicts and notes.

    Verdicts are given once every run has ended. Seen after each run, they would invite a stop at a lucky moment; so
    every number of seeds at which they are seen is a look, and later verdicts take it into account. With an `effect`
    the runs are a pilot: they say how many seeds a difference of this share takes, and show no verdict, so that they
    can be part of the comparison."""
    runs = [found[key] for key in begun.asked if key in found]
    asked, seeds = len(begun.asked), begun.budget.seeds or 1
    ended = len(runs) == asked
    seen = {*begun.looks, seeds} if ended and seeds > 1 and effect is None else set(begun.looks)
    looks = sorted(seen | set(begun.planned_looks))
    given = verdicts(runs, looks=looks) if ended and seeds in seen else []
    given = [one.changed(terms=terms(begun, runs, (one.a, one.b))) for one in given]
    budget, late = _spent(begun.budget, runs)
    late = stand_in(runs, given) + late + other_machines(runs, begun.machine) + older_weights(runs)
    if given:
        late += look_notes(sorted(seen), begun.planned_looks)
    power = needed(runs, effect) if ended and effect is not None else None
    if ended and effect is not None and power is None:
        late.append("No arm finished two seeds with the first: this pilot says nothing of the seeds that are needed.")
    results = begun.changed(
        status="complete" if ended else f"{len(runs)} of {asked} runs so far",
        runs=runs,
        verdicts=given,
        looks=sorted(seen),
        budget=budget.changed(notes=[*budget.notes, *late]),
    )
    return results if power is None else results.changed(power=power)


def write(results: Results, folder: Path) -> None:
    """Replaces results.json and the report."""
    with disk_errors(folder):
        write_results(results, folder)
        write_report(results.to_dict(), folder / "report.html")


def _spent(budget: Budget, runs: Sequence[RunResult]) -> tuple[Budget, list[str]]:
    """For a budget in minutes: the mean time of each arm, and a note if they differ."""
    if budget.match != "minutes":
        return budget, []
    seconds: dict[str, list[float]] = {}
    for run in runs:
        if run.status == "ok" and run.train is not None:
            seconds.setdefault(run.name, []).append(run.train.seconds)
    spent = {name: fmean(values) / 60 for name, values in seconds.items()}
    return budget.changed(spent=spent), unequal(spent, "minutes")


def other_machines(runs: Sequence[RunResult], here: Machine) -> list[str]:
    """A note for every run that was measured on another machine."""
    return [
        f"{run.name} seed {run.seed} was measured on another machine or setting: speeds do not compare."
        for run in runs
        if not run.machine.like(here)
    ]


def older_weights(runs: Sequence[RunResult]) -> list[str]:
    """A note if initial weights of runs were drawn by an older rule."""
    older = [run for run in runs if run.status != "failed" and run.weights != WEIGHTS_RULE]
    if not older:
        return []
    names = [f"{run.name} seed {run.seed}" for run in older]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return [
        f"{', '.join(names[:NAMED])}{more}: the initial weights were drawn by an older rule. A seed gives other "
        f"weights today, so no verdict mixes runs of both rules."
    ]
