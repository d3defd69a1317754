"""A comparison in which every arm has its own best learning rate, chosen on seeds that the verdict does not use.

OUT/tuning/        a comparison of every arm at every rate of one grid, two seeds each, for the choice of rates
OUT/               a comparison of the arms at their chosen rates, on fresh seeds: results.json has `tuning`
OUT/usual/         the same seeds at the default rates, for the verdict without tuning
OUT/tuning.html    the curves of loss against rate, and both verdicts side by side

The unit of work is `experiment.carry_out`, so that every part can be resumed and extended with more seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

from glassformer.comparison.arms import DesignArm
from glassformer.comparison.design import Design
from glassformer.comparison.experiment import Saved, carry_out, checked_folder, command_of, read_text
from glassformer.comparison.folder import check_looks, refuse_other_files
from glassformer.comparison.rates import (
    EXTENSIONS,
    FACTOR,
    START,
    TUNING_SEEDS,
    Choice,
    Curve,
    choose,
    search,
    sensitivity,
)
from glassformer.comparison.result import Comparison
from glassformer.comparison.summary import write
from glassformer.config import ModelConfig
from glassformer.errors import RequestError, WorkError
from glassformer.files import only_writer, refuse_foreign, replace_text
from glassformer.report.tuning import write_tuning
from glassformer.runs.events import Begin, Event, Notify, StageEvent, silent
from glassformer.runs.executor import Executor, trains_here
from glassformer.runs.files import read_results
from glassformer.runs.results import Results, RunResult, Trial, TunedArm, Tuning, Verdict
from glassformer.text import Tokens
from glassformer.training import Recipe
from glassformer.training.pace import DECIDED, evaluated, paces, run_seconds
from glassformer.training.request import fit
from glassformer.units import plural

TRIALS, USUAL, PAGE, PACES = "tuning", "usual", "tuning.html", "paces.json"
PACED = 12
"""Timed steps of each arm for an estimate of the duration"""


def tuned(
    design: Design,
    text: Tokens | None,
    out: str | Path,
    *,
    notify: Notify = silent,
    executor: Executor | None = None,
    command: str | None = None,
    origin: Saved | None = None,
) -> Comparison:
    """Carries out a design with a learning rate chosen for each arm, and returns the comparison. Its `results.tuning`
    holds trials, rates, cost, and the verdicts at the chosen and at the default rates.

    Every arm is trained at half, once and twice the default rate, on the same two seeds. As long as some arm does best
    at an edge of this grid, all arms get one more rate beyond that edge, up to five in all. An arm's rate is the
    minimum of the parabola through its best rate and the two neighbours. The verdict is measured at these rates on
    seeds that come after those of the trials, because the lowest of several noisy losses is biased downwards; and on
    the same seeds at the default rates, for comparison.

    Raises RequestError for everything that `carry_out` refuses, for seeds on which the rates were chosen, for
    `design.within` if other machines train the runs, and if a few timed steps of every arm show that the work would
    take longer than `design.within` minutes. Raises WorkError if a run failed, or if an arm still does best at the edge
    of the widest grid.
    """
    folder, first = checked_folder(out), design.first_seed
    choosing = range(first, first + TUNING_SEEDS)
    fresh = range(choosing.stop, choosing.stop + design.seeds)
    check_looks(folder, design.looks)
    if design.within is not None and not trains_here(executor):
        raise RequestError(
            "--within is for runs on this machine, whose steps can be timed; leave it out, and give the time of a job "
            "in --executor",
            code="conflict", field="within", value=design.within, expected="no --within",
        )  # fmt: skip
    _refuse_folder(folder, choosing, fresh)
    text = read_text(design, design.tokenizer, notify, folder) if text is None else text
    size = text.tokenizer.vocab_size
    configs = {arm.name: fit(arm.config, size, design.context, arm.own("vocab_size")) for arm in design.arms}
    work = _Work(
        folder=folder,
        text=text,
        design=design,
        origin=origin or design,
        configs=configs,
        plans=design.plans(configs, size, objective=design.common.objective.among(configs)),
        choosing=choosing,
        fresh=fresh,
        command=command or command_of(origin or design, folder),
        notify=notify,
        executor=executor,
        began=monotonic(),
    )
    return Comparison(work.done(), design, folder)


def _refuse_folder(folder: Path, choosing: range, fresh: range) -> None:
    """Raises RequestError if the folder holds an untuned comparison, files of another origin, or if a seed would be
    used both for the choice of rates (`choosing`) and for the verdict (`fresh`)."""
    for place in (folder, folder / TRIALS, folder / USUAL):
        refuse_other_files(place)
    refuse_foreign(folder, PAGE)
    refuse_foreign(folder / TRIALS, PACES, ours=bool(_read_rates(folder / TRIALS / PACES)))
    trials, verdict = read_results(folder / TRIALS), read_results(folder)
    if verdict is not None and trials is None:
        raise RequestError(
            f"--out {folder} holds a comparison that was not tuned; name another folder",
            code="exists", field="out", value=str(folder),
        )  # fmt: skip
    tried = {*choosing, *(run.seed for run in (trials.runs if trials else []))}
    judged = {*fresh, *(run.seed for run in (verdict.runs if verdict else []))}
    if both := sorted(tried & judged):
        raise RequestError(
            f"seed {both[0]} would be of the verdict and of the trials that the rates are chosen on, in {folder}: a "
            "verdict needs fresh seeds; name another folder",
            code="conflict", field="seed", value=choosing.start, expected="the seed of the existing comparison",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Work:
    folder: Path
    text: Tokens
    design: Design
    origin: Saved
    """The requested experiment, which is saved in the folder"""
    configs: dict[str, ModelConfig]
    """Configs as requested, with the vocabulary of the text"""
    plans: dict[str, Recipe]
    choosing: range
    """Seeds of the trials"""
    fresh: range
    """Seeds of the verdicts"""
    command: str
    notify: Notify
    executor: Executor | None
    began: float

    @property
    def arms(self) -> tuple[DesignArm, ...]:
        return self.design.arms

    def verdict(self, arms: Sequence[DesignArm], folder: Path, **options: Any) -> Results:
        return self.compare(arms, folder, self.fresh, looks=self.design.looks, **options)

    def before(self, found: Tuning) -> Tuning:
        """Returns the tuning record that the folder holds, with its verdicts, if it has the arms and rates of `found`;
        otherwise `found` itself."""
        results = read_results(self.folder)
        held = None if results is None else results.tuning
        if held is None or not held.tuned:
            return found
        same = {one.tuned_as for one in held.arms} == {one.tuned_as for one in found.arms}
        return held if same else found

    def compare(
        self,
        arms: Sequence[DesignArm],
        folder: Path,
        seeds: range,
        *,
        notify: Notify | None = None,
        tuning: Tuning | None = None,
        origin: Saved | None = None,
        **changes: Any,
    ) -> Results:
        """Trains one part of the tuned comparison in `folder`, the design without tuning and with these arms, seeds and
        `changes`, and returns its results. Raises WorkError for a failed run."""
        plain = {"tune": False, "within": None, "looks": (), "seed": seeds.start, "seeds": len(seeds), **changes}
        if self.design.minutes is not None:  # the same for all trials
            plain = {**{name: getattr(self.design.common, name) for name in DECIDED}, **plain}
        found = carry_out(
            self.design.replace(arms=tuple(arms), **plain), self.text, folder, notify=notify or self.notify,
            executor=self.executor, command=self.command, tuning=tuning, origin=origin,
        )  # fmt: skip
        _refuse_failed(found.runs, folder)
        return found.results

    def done(self) -> Results:
        seconds = self.seconds()
        curves = search(lambda grid: self.tried(grid, seconds), self.held())
        trials = self.trials()
        choices = {arm: choose(curve) for arm, curve in curves.items()}
        found = self.tuning(curves, choices, trials)
        before = self.before(found)  # earlier verdicts are kept until there are new ones, in case of an interruption
        self.draw(before)
        self.refuse_unsettled(curves, choices)
        chosen = {one.tuned_as: one.name for one in found.arms}
        self.notify(StageEvent(words=f"fresh seeds {_listed(self.fresh)} at the chosen rates"))
        arms = [self.at(arm, choices[arm.name].power) for arm in self.arms]
        tuned = self.verdict(arms, self.folder, tuning=before, origin=self.origin)
        usual = self.usual(tuned, choices)
        found = found.changed(
            arms=[_with_losses(one, tuned, usual) for one in found.arms],
            runs={**found.runs, "tuned": len(tuned.runs), "usual": len(usual.runs) * (usual is not tuned)},
            minutes={**found.minutes, "tuned": _minutes(tuned), "usual": _minutes(usual) * (usual is not tuned)},
            tuned=_verdicts(tuned, chosen),
            usual=_verdicts(usual, chosen),
        )
        results = tuned.changed(tuning=found, title=self.title())
        with only_writer(self.folder):
            write(results, self.folder)
        self.draw(found)
        return results

    def title(self) -> str:
        names = list(self.configs)
        who = " and ".join(names) if len(names) <= 2 else f"{len(names)} language models"
        return f"{who} on {self.text.name}, each at its own learning rate"

    def usual(self, tuned: Results, choices: Mapping[str, Choice]) -> Results:
        """Trains the arms at their default rates on the seeds of the verdict and returns the results; returns `tuned`
        itself if all chosen rates are the defaults."""
        if all(choice.power == 0 for choice in choices.values()):
            return tuned
        self.notify(StageEvent(words=f"fresh seeds {_listed(self.fresh)} at the usual rates"))
        return self.verdict(self.arms, self.folder / USUAL)

    # Rates

    def rate(self, arm: str, power: float) -> float:
        """Returns the learning rate FACTOR**power times the default one of an arm, rounded to three digits as in the
        arms' names."""
        usual = self.plans[arm].learning_rate
        assert usual is not None  # filled in by `recipes`
        return float(f"{usual * FACTOR**power:.3g}")

    def at(self, arm: DesignArm, power: float) -> DesignArm:
        return arm.changed([f"recipe.learning_rate={self.rate(arm.name, power):.3g}"])

    def trials(self) -> Results:
        results = read_results(self.folder / TRIALS)
        assert results is not None  # written by `tried`
        return results

    def held(self) -> list[int]:
        """Returns the learning rates, as powers of FACTOR, at which an earlier call requested trials in the folder."""
        results = read_results(self.folder / TRIALS)
        asked = {name for name, _ in results.asked} if results else set()
        reach = range(START[0] - EXTENSIONS, START[-1] + EXTENSIONS + 1)
        return [power for power in reach if any(self.at(arm, power).name in asked for arm in self.arms)]

    def tried(self, grid: list[int], seconds: Mapping[str, float] | None) -> dict[str, Curve]:
        """Trains every arm at the rates `grid`, powers of FACTOR; returns {arm: {power: losses by seed}}."""
        self.announce(grid, seconds)
        arms = [self.at(arm, power) for power in grid for arm in self.arms]
        results = self.compare(arms, self.folder / TRIALS, self.choosing, notify=self.without_notes, loss_alone=True)
        losses = {run.key: _loss(run) for run in results.runs}
        return {
            arm.name: {power: [losses[self.at(arm, power).name, seed] for seed in self.choosing] for power in grid}
            for arm in self.arms
        }

    def without_notes(self, event: Event) -> None:
        """Passes an event on to `notify`, without its notes if it is the start of the trials: a note that each arm has
        its own learning rate is superfluous here, and the verdict repeats the other notes."""
        self.notify(event.model_copy(update={"notes": []}) if isinstance(event, Begin) else event)

    def refuse_unsettled(self, curves: Mapping[str, Curve], choices: Mapping[str, Choice]) -> None:
        for arm, choice in choices.items():
            if choice.settled:
                continue
            powers = sorted(curves[arm])
            side = "lowest" if choice.best == powers[0] else "highest"
            says = f"does best at {self.rate(arm, choice.best):.3g}, the {side}"
            if math.isinf(min(map(fmean, curves[arm].values()))):
                says = f"diverged at {self.rate(arm, powers[0]):.3g} and every other"
            raise WorkError(
                f"{arm} {says} of the {len(powers)} rates that each arm was tried at, {EXTENSIONS} more than the first "
                f"grid at most: its best rate is not known, so no verdict is measured; the curves are in "
                f"{self.folder / PAGE}",
                code="range",
            )  # fmt: skip

    # Time

    def announce(self, grid: Sequence[int], seconds: Mapping[str, float] | None) -> None:
        """Reports the runs to come and how long they take; raises RequestError if they take longer than `design.within`
        minutes."""
        left = {arm: max(0, len(grid) * TUNING_SEEDS + 2 * len(self.fresh) - self.ended(arm)) for arm in self.configs}
        runs = sum(left.values())
        design = (
            f"{len(grid)} rates x {TUNING_SEEDS} seeds for each of {len(self.configs)} arms, then {len(self.fresh)} "
            "fresh seeds at the chosen and at the usual rates"
        )
        if seconds is None:
            if runs:
                self.notify(StageEvent(words=f"{design}: {plural(runs, 'run')} to come"))
            return
        beside = 1 if self.executor is None or self.executor.shared else self.executor.workers or 1
        whole = sum(seconds[arm] * count for arm, count in left.items()) / beside
        each = TUNING_SEEDS * sum(seconds.values()) / beside
        spent = (monotonic() - self.began) / 60
        if self.design.within is not None and spent + whole / 60 > self.design.within:
            needed = math.ceil(spent + whole / 60)
            raise RequestError(
                f"--within {self.design.within:g} minutes is too little: {design}, {plural(runs, 'run')} to come, take "
                f"about {_words(whole)}; what was trained is kept",
                code="range", field="within", value=self.design.within, expected=f"at least {needed}",
            )  # fmt: skip
        if runs:
            more = f"; {_words(each)} more for each rate that is added at an edge"
            self.notify(StageEvent(words=f"{design}: {plural(runs, 'run')} to come, about {_words(whole)}{more}"))

    def ended(self, arm: str) -> int:
        """Returns the number of an arm's runs, trials and runs for the verdict at all rates, that need not be trained
        again."""
        found = (read_results(place) for place in (self.folder / TRIALS, self.folder, self.folder / USUAL))
        runs = [run for results in found if results is not None for run in results.runs if run.status != "failed"]
        return sum(run.name == arm or run.name.startswith(f"{arm}+recipe.learning_rate=") for run in runs)

    def seconds(self) -> dict[str, float] | None:
        """Returns {arm: seconds that one of its runs takes on this machine}, estimated from a few timed steps, whose
        speeds are stored for later calls; None if other machines train the runs."""
        if not trains_here(self.executor):
            return None
        path = self.folder / TRIALS / PACES
        rates = _read_rates(path)
        if missing := [arm for arm in self.configs if arm not in rates]:
            self.notify(StageEvent(words=f"timing {PACED} steps of each arm"))
            models = {arm: (self.configs[arm], self.plans[arm]) for arm in missing}
            rates |= {arm: pace.tokens_per_second for arm, pace in paces(models, self.text, steps=PACED).items()}
            replace_text(path, json.dumps(rates))
        return {arm: self.takes(arm, rates[arm]) for arm in self.configs}

    def takes(self, arm: str, tokens_per_second: float) -> float:
        plan = self.plans[arm]
        steps = plan.num_steps(self.configs[arm])
        tokens = 60 * (plan.minutes or 0.0) * tokens_per_second if steps is None else steps * plan.tokens_per_step
        return run_seconds(tokens, tokens_per_second, evaluated(plan, self.text))

    # What is left

    def tuning(self, curves: Mapping[str, Curve], choices: Mapping[str, Choice], trials: Results) -> Tuning:
        grid = len(next(iter(curves.values())))
        return Tuning(
            arms=[self.tuned_arm(arm, curves[arm.name], choices[arm.name], trials) for arm in self.arms],
            budget=_budget(trials),
            seeds=list(self.choosing),
            fresh=list(self.fresh),
            extended=grid - len(START),
            runs={"choosing": len(trials.runs)},
            minutes={"choosing": _minutes(trials)},
        )

    def tuned_arm(self, one: DesignArm, curve: Curve, choice: Choice, trials: Results) -> TunedArm:
        arm = one.name
        started = [run.train.curve[0][1] for run in trials.runs if self.of(run, arm) and run.train and run.train.curve]
        start = [loss for loss in started if loss is not None]
        return TunedArm(
            name=arm,
            usual=self.rate(arm, 0),
            trials=[
                Trial(power=power, rate=self.rate(arm, power), seed=seed, loss=loss if math.isfinite(loss) else None)
                for power, losses in sorted(curve.items())
                for seed, loss in zip(self.choosing, losses, strict=True)
            ],
            chosen=self.rate(arm, choice.power),
            between=choice.between,
            settled=choice.settled,
            sensitivity=sensitivity(curve, fmean(start)) if start else 0.0,
            tuned_as=self.at(one, choice.power).name,
        )

    def of(self, run: RunResult, arm: str) -> bool:
        return run.name.startswith(f"{arm}+recipe.learning_rate=")

    def draw(self, found: Tuning) -> None:
        write_tuning(found, self.command, self.folder / PAGE)


def _loss(run: RunResult) -> float:
    """Returns the loss of a trial; infinite if the run diverged."""
    return run.validation.loss if run.status == "ok" and run.validation is not None else math.inf


def _refuse_failed(runs: Sequence[RunResult], folder: Path) -> None:
    """Raises WorkError for a run that failed, because arms must have the same number of trials."""
    if failed := [run for run in runs if run.status == "failed"]:
        one = failed[0]
        raise WorkError(
            f"{len(failed)} of {len(runs)} runs failed: {one.name} seed {one.seed}: {one.error}; what is finished is "
            f"in {folder}, and the same command continues from here",
            code="failed",
        )  # fmt: skip


def _with_losses(arm: TunedArm, tuned: Results, usual: Results) -> TunedArm:
    name = arm.name if usual is not tuned else arm.tuned_as
    return arm.changed(loss_chosen=_mean(tuned, arm.tuned_as), loss_usual=_mean(usual, name))


def _mean(results: Results, name: str) -> float | None:
    """Returns the mean loss of the arm `name` over seeds; None if a run diverged."""
    losses = [_loss(run) for run in results.runs if run.name == name]
    mean = fmean(losses)
    return mean if math.isfinite(mean) else None


def _verdicts(results: Results, names: Mapping[str, str]) -> list[Verdict]:
    """Returns the verdicts of a comparison with each arm renamed by `names`, {its name with the tuned rate: its
    requested name}."""
    return [one.changed(a=names.get(one.a, one.a), b=names.get(one.b, one.b)) for one in results.verdicts]


def _minutes(results: Results) -> float:
    return sum(run.train.seconds for run in results.runs if run.train is not None) / 60


def _budget(results: Results) -> str:
    """Returns the budget of each run of a comparison as text."""
    budget = results.budget
    amounts = {"tokens": budget.tokens, "FLOPs": budget.flops, "minutes": budget.minutes}
    return " and ".join(f"{amount:,.6g} {unit}" for unit, amount in amounts.items() if amount is not None)


def _words(seconds: float) -> str:
    """Returns an estimated duration as text, with two significant digits."""
    value, unit = next(
        ((seconds / size, unit) for size, unit in ((3600, "hours"), (60, "minutes")) if seconds >= 1.5 * size),
        (seconds, "seconds"),
    )
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def _listed(seeds: range) -> str:
    return f"{seeds.start} to {seeds[-1]}"


def _read_rates(path: Path) -> dict[str, float]:
    """Returns the training speeds that the file stores, {arm: tokens per second}; {} if the file cannot be read."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return {str(arm): float(rate) for arm, rate in tree.items() if 0 < float(rate) < math.inf}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
