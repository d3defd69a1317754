"""Results of a comparison so far: runs, verdicts and notes, and the files that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from glassformer.comparison.request import unequal
from glassformer.comparison.statistics import stand_in, verdicts
from glassformer.parts.init import WEIGHTS_RULE
from glassformer.report import write_report
from glassformer.runs.files import write_results
from glassformer.runs.results import Budget, Key, Machine, Results, RunResult
from glassformer.training.checkpoint import disk_errors

NAMED = 4
"""Number of runs that a note names."""


def so_far(begun: Results, found: Mapping[Key, RunResult]) -> Results:
    """The results with the runs `found`, in the requested order, and their verdicts and notes."""
    runs = [found[key] for key in begun.asked if key in found]
    given = verdicts(runs)
    budget, late = _spent(begun.budget, runs)
    late = stand_in(runs, given) + late + other_machines(runs, begun.machine) + older_weights(runs)
    asked = len(begun.asked)
    return begun.changed(
        status="complete" if len(runs) == asked else f"{len(runs)} of {asked} runs so far",
        runs=runs,
        verdicts=given,
        budget=budget.changed(notes=[*budget.notes, *late]),
    )


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
