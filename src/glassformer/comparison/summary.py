"""Results of a comparison in progress: runs, verdicts and notes, and the files that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from glassformer.comparison.arms import unequal
from glassformer.comparison.terms import barely_learned, terms, unit
from glassformer.report import write_report
from glassformer.runs.files import write_results
from glassformer.runs.looks import look_notes
from glassformer.runs.power import needed
from glassformer.runs.results import Budget, Key, MachineRecord, Results, RunResult, unlike
from glassformer.runs.verdicts import stand_in, verdicts
from glassformer.thresholds import FROM_CONTEXT

COMPANY_LEAST = 0.25
"""Number of cores used by other programs above which a machine counts as busy"""
NAMED = 4
"""Largest number of runs that a note names"""

PACED = (
    "Runs were trained side by side. Training speeds are those of a few steps of each model in turn; speeds of "
    "generation are those of runs side by side, and do not compare."
)


def so_far(begun: Results, found: Mapping[Key, RunResult], effect: float | None = None) -> Results:
    """Returns the results so far: the ended runs `found` in the requested order, with verdicts and notes.

    Verdicts are given only when every run has ended: reading verdicts after each run would invite stopping at a lucky
    moment. Each number of seeds at which verdicts are read is a look, and later verdicts are corrected for earlier
    looks. With an `effect` the runs are a pilot: they give the number of seeds needed for a difference of this fraction
    and no verdict, so that they may be reused in the comparison."""
    runs = [found[key] for key in begun.asked if key in found]
    asked, seeds = len(begun.asked), begun.budget.seeds or 1
    ended = len(runs) == asked
    seen = {*begun.looks, seeds} if ended and seeds > 1 and effect is None else set(begun.looks)
    looks = sorted(seen | set(begun.planned_looks))
    why = unlike(runs)
    timeless = why is None or begun.budget.match != "minutes"
    given = verdicts(runs, looks=looks) if ended and seeds in seen and timeless else []
    given = [one.changed(unit=unit(runs), terms=terms(begun, runs, (one.a, one.b))) for one in given]
    budget, late = _spent(begun.budget, runs)
    speeds = [PACED] if begun.speeds else other_machines(runs, why, timeless)
    late = stand_in(runs, given) + late + speeds + busy(runs)
    late += barely_trained(runs)
    if given:
        late += look_notes(sorted(seen), begun.planned_looks)
    power = needed(runs, effect) if ended and effect is not None else None
    if ended and effect is not None and power is None:
        late.append("No arm finished two seeds with the first: this pilot says nothing of the seeds that are needed.")
    results = begun.changed(
        status="complete" if ended else f"{len(runs)} of {asked} runs so far",
        runs=runs,
        machine=trained_on(runs, begun.machine),
        verdicts=given,
        looks=sorted(seen),
        budget=budget.changed(notes=[*budget.notes, *late]),
    )
    return results if power is None else results.changed(power=power)


def write(results: Results, folder: Path) -> None:
    """Writes results.json and report.html to `folder`, replacing earlier files."""
    write_results(results, folder)
    write_report(results, folder / "report.html")


def _spent(budget: Budget, runs: Sequence[RunResult]) -> tuple[Budget, list[str]]:
    """Returns (budget, notes): for a budget in minutes, with the mean training time of each arm, and a note if these
    times differ."""
    if budget.match != "minutes":
        return budget, []
    seconds: dict[str, list[float]] = {}
    for run in runs:
        if run.status == "ok" and run.train is not None:
            seconds.setdefault(run.name, []).append(run.train.seconds)
    spent = {name: fmean(values) / 60 for name, values in seconds.items()}
    return budget.changed(spent=spent), unequal(spent, "minutes")


def trained_on(runs: Sequence[RunResult], here: MachineRecord) -> MachineRecord:
    """Returns the machine that the results name: `here`, that of this process, unless runs record their machine and
    none was trained on one like it; then the machine of the first of these runs."""
    elsewhere = [run.machine for run in runs if run.status != "failed" and run.machine.root]
    return elsewhere[0] if elsewhere and not any(one.like(here) for one in elsewhere) else here


def barely_trained(runs: Sequence[RunResult]) -> list[str]:
    """Returns a note if models have barely learned from context, because the verdict then need not hold for trained
    models; otherwise []."""
    losses = {
        name: fmean(run.validation.loss for run in runs if run.name == name and run.validation is not None)
        for name in barely_learned(runs, dict.fromkeys(run.name for run in runs))
    }
    if not losses:
        return []
    floor = next(run.validation.frequency_loss for run in runs if run.validation is not None) or 0.0
    told = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
    return [
        f"Barely trained: the frequencies of tokens have a held-out loss of {floor:.3f} nats per token without any "
        f"context, and these models are not {FROM_CONTEXT:.0%} below it: {told}. A verdict, of equivalence too, says "
        "nothing of models that are trained for longer; give more tokens or minutes."
    ]


def busy(runs: Sequence[RunResult]) -> list[str]:
    """Returns a note if other programs used the cores during runs, so that speeds are lower than on an idle machine and
    vary randomly; otherwise []."""
    met = [run for run in runs if run.machine.company > COMPANY_LEAST and not run.machine.shared]
    if not met:
        return []
    most = max(met, key=lambda run: run.machine.company)
    return [
        f"The machine was not quiet: other programs used up to {most.machine.company:.1f} cores while "
        f"{len(met)} of {len(runs)} runs were trained (most: {most.name} seed {most.seed}); speeds are lower than "
        "those of a quiet machine, and differ by chance."
    ]


def other_machines(runs: Sequence[RunResult], why: str | None, timeless: bool) -> list[str]:
    """Returns a note if the runs' speeds cannot be compared for the reason `why`; otherwise []. It names the runs that
    were trained on another machine than most. If the budget is in minutes (`timeless` is False), it adds that no
    verdict is given."""
    if why is None:
        return []
    told = [run for run in runs if run.status != "failed"]
    most = max(told, key=lambda one: sum(unlike([run, one]) is None for run in told))
    names = [f"{run.name} seed {run.seed}" for run in told if unlike([run, most]) is not None]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    budget = "" if timeless else ", and a budget in minutes gives no verdict"
    return [f"{why[0].upper()}{why[1:]} ({', '.join(names[:NAMED])}{more}): speeds do not compare{budget}."]
