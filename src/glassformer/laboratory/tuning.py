"""A comparison in which every arm has its own best learning rate, chosen on seeds that its verdict does not use.

OUT/tuning/        a comparison of every arm at every rate of one grid, two seeds each: the rates are chosen here
OUT/               a comparison of the arms at their chosen rates, on fresh seeds: results.json has `tuning`
OUT/usual/         the same seeds at the rates of the rule by size: what the verdict would have been
OUT/tuning.html    the curves of loss against rate, and both verdicts side by side

The unit of work is `comparison.compare`, so that all of it resumes and takes more seeds.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

from glassformer.comparison import compare
from glassformer.comparison.command import command_of
from glassformer.comparison.folder import check_looks
from glassformer.comparison.request import (
    Match,
    arms,
    check_seeds,
    common_context,
    fairness,
    recipe_defaults,
    recipes,
    tokens_of_steps,
)
from glassformer.comparison.summary import write
from glassformer.config import ModelConfig
from glassformer.errors import RequestError, WorkError
from glassformer.files import only_writer, replace_text
from glassformer.laboratory.rates import (
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
from glassformer.naming import own_value, split_recipe
from glassformer.report.tuning import write_tuning
from glassformer.runs.events import Begin, End, Event, Notify, StageEvent, Start, silent
from glassformer.runs.executor import Executor
from glassformer.runs.files import read_results
from glassformer.runs.results import Results, RunResult, Trial, TunedArm, Tuning, Verdict
from glassformer.text import OnProgress, TextData, prepare
from glassformer.training import Recipe
from glassformer.training.request import fit

TRIALS, USUAL, PAGE, PROBE = "tuning", "usual", "tuning.html", "probe.json"
PROBE_STEPS = 12
"""Steps of each arm that are timed, for an estimate."""
LEAST_SEEDS = 2
"""Of a verdict: one seed has no interval."""


def tune(
    expressions: Sequence[str],
    data: str | Path | TextData,
    tokens: int | None = None,
    minutes: float | None = None,
    flops: float | None = None,
    steps: int | None = None,
    match: Match | None = None,
    seeds: int = 3,
    out: str | Path = "comparison",
    tokenizer: str = "auto",
    allow_unmatched: bool = False,
    within: float | None = None,
    on_event: Notify | None = None,
    on_progress: OnProgress | None = None,
    command: str | None = None,
    log_to: Sequence[str] = (),
    executor: Executor | None = None,
    looks: Sequence[int] = (),
    **recipe: Any,
) -> dict[str, Any]:
    """`compare` with a learning rate for each arm that was chosen for it; returns the content of results.json, whose
    `tuning` holds trials, rates, cost, and the verdicts at the chosen and at the usual rates.

    Every arm is trained at half, once and twice the rate of the usual rule, on the same two seeds. While some arm does
    best at an edge of this grid, all arms get one rate more there, at most five. An arm's rate is the minimum of the
    parabola through its best rate and the neighbours of that. The verdict is measured at these rates on `seeds` seeds
    that come after those of the trials, because the lowest of several noisy losses is too low; and on the same seeds at
    the usual rates, for comparison.

    within    minutes that all of this may take: refused where it would take longer, with the time that it would take,
              after a few steps of every arm were timed
    all else  as in `compare`

    Raises RequestError for what `compare` refuses, a learning rate that is given, and seeds that the rates were chosen
    on; WorkError where a run failed, or where an arm still does best at the edge of the widest grid.
    """
    if not str(out):
        raise RequestError("--out is empty; name a folder", code="missing", field="out", value="", expected="a folder")
    folder, seeds = Path(out), check_seeds(seeds)
    _refuse_rates(expressions, recipe.get("learning_rate"))
    if seeds < LEAST_SEEDS:
        message = f"seeds={seeds} gives no verdict; --tune needs --seeds {LEAST_SEEDS} or more, by default 3"
        raise RequestError(message, code="range", field="seeds", value=seeds, expected=f"at least {LEAST_SEEDS}")
    if within is not None and not 0 < within < math.inf:
        raise RequestError(code="range", field="within", value=within, expected="a number of minutes above 0")
    configs = arms(expressions)
    fairness(configs, allow_unmatched, match or ("minutes" if minutes is not None else None))
    context = common_context(configs, recipe.get("context"))
    amounts = {"minutes": minutes, "flops": flops}
    tokens_asked = tokens_of_steps(steps, tokens, recipe.get("batch_size"), context)
    fields = {**recipe_defaults(), **recipe, **amounts, "tokens": tokens_asked, "context": context}
    recipes(configs, fields, match, vocab_size=1)
    first = fields["seed"]
    choosing, fresh = range(first, first + TUNING_SEEDS), range(first + TUNING_SEEDS, first + TUNING_SEEDS + seeds)
    check_looks(folder, looks)
    _refuse_folder(folder, choosing, fresh)

    text = data if isinstance(data, TextData) else prepare(data, tokenizer, context, progress=on_progress)
    size = text.tokenizer.vocab_size
    configs = {name: fit(c, size, context, own_value(name, c, "vocab_size")) for name, c in configs.items()}
    given = {**recipe, **amounts, "tokens": tokens, "steps": steps, "match": match, "allow_unmatched": allow_unmatched}
    told = {**recipe, **amounts, "tokens": tokens_asked, "match": match, "tokenizer": tokenizer, "looks": list(looks)}
    work = _Work(
        folder=folder,
        text=text,
        configs=configs,
        plans=recipes(configs, fields, match, size),
        choosing=choosing,
        fresh=fresh,
        given={name: value for name, value in given.items() if name != "seed"},
        log_to=log_to,
        command=command or _call(expressions, data, {**told, "allow_unmatched": allow_unmatched}, seeds, out),
        within=within,
        notify=on_event or silent,
        executor=executor,
        looks=looks,
        began=monotonic(),
    )
    return work.done().to_dict()


def _refuse_rates(expressions: Sequence[str], given: object) -> None:
    if given is not None:
        message = f"--lr {given} fixes the learning rate that --tune looks for; give one of them"
        raise RequestError(message, code="conflict", field="learning_rate", value=given, expected="left out")
    for expression in expressions:
        if (own := split_recipe(expression)[1].get("learning_rate")) is not None:
            raise RequestError(
                f"{expression} sets its own learning rate, which --tune would choose: leave +recipe.learning_rate out",
                code="conflict", field="recipe.learning_rate", value=own, expected="left out",
            )  # fmt: skip


def _refuse_folder(folder: Path, choosing: range, fresh: range) -> None:
    """Raises RequestError where the folder holds a comparison whose rates were not chosen, or where a seed would be one
    of the verdict that the rates were chosen on."""
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
            code="conflict", field="seed", value=choosing.start, expected="the seed of the comparison that is there",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Work:
    folder: Path
    text: TextData
    configs: dict[str, ModelConfig]
    """As asked for, of the text's vocabulary."""
    plans: dict[str, Recipe]
    choosing: range
    """Seeds of the trials."""
    fresh: range
    """Seeds of the verdicts."""
    given: dict[str, Any]
    """What all comparisons are called with."""
    log_to: Sequence[str]
    command: str
    within: float | None
    notify: Notify
    executor: Executor | None
    looks: Sequence[int]
    """Of the verdicts."""
    began: float

    def verdict(self, expressions: Sequence[str], folder: Path, **options: Any) -> Results:
        return self.compare(expressions, folder, self.fresh, looks=self.looks, **options)

    def before(self, found: Tuning) -> Tuning:
        """What the folder holds of these arms at these rates, with its verdicts; `found` where it holds none."""
        results = read_results(self.folder)
        held = None if results is None else results.tuning
        if held is None or not held.tuned:
            return found
        same = {one.tuned_as for one in held.arms} == {one.tuned_as for one in found.arms}
        return held if same else found

    def compare(self, expressions: Sequence[str], folder: Path, seeds: range, **options: Any) -> Results:
        results = Results.of(
            compare(
                expressions, self.text, **self.given, seed=seeds.start, seeds=len(seeds), out=folder,
                command=self.command, log_to=self.log_to, executor=self.executor,
                **{"on_event": self.notify, **options},
            )
        )  # fmt: skip
        _refuse_failed(results.runs, folder)
        return results

    def done(self) -> Results:
        seconds = self.seconds()
        curves = search(lambda grid: self.tried(grid, seconds), self.held())
        trials = self.trials()
        choices = {arm: choose(curve) for arm, curve in curves.items()}
        found = self.tuning(curves, choices, trials)
        before = self.before(found)  # its verdicts stand until there are others, should this be stopped
        self.draw(before)
        self.refuse_unsettled(curves, choices)
        chosen = {one.tuned_as: one.name for one in found.arms}
        self.notify(StageEvent(words=f"fresh seeds {_listed(self.fresh)} at the chosen rates"))
        tuned = self.verdict(list(chosen), self.folder, tuning=before)
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
        """The same seeds at the usual rates; the tuned comparison itself where these were chosen."""
        if all(choice.power == 0 for choice in choices.values()):
            return tuned
        self.notify(StageEvent(words=f"fresh seeds {_listed(self.fresh)} at the usual rates"))
        return self.verdict(list(self.configs), self.folder / USUAL)

    # Rates

    def rate(self, arm: str, power: float) -> float:
        """Rounded as it stands in names."""
        usual = self.plans[arm].learning_rate
        assert usual is not None  # `recipes` fills it in
        return float(f"{usual * FACTOR**power:.3g}")

    def at(self, arm: str, power: float) -> str:
        return f"{arm}+recipe.learning_rate={self.rate(arm, power):.3g}"

    def trials(self) -> Results:
        results = read_results(self.folder / TRIALS)
        assert results is not None  # `tried` has written it
        return results

    def held(self) -> list[int]:
        """Powers that were begun before."""
        results = read_results(self.folder / TRIALS)
        asked = {name for name, _ in results.asked} if results else set()
        reach = range(START[0] - EXTENSIONS, START[-1] + EXTENSIONS + 1)
        return [power for power in reach if any(self.at(arm, power) in asked for arm in self.configs)]

    def tried(self, grid: list[int], seconds: Mapping[str, float]) -> dict[str, Curve]:
        """The losses of all arms at these powers."""
        self.announce(grid, seconds)
        names = [self.at(arm, power) for power in grid for arm in self.configs]
        results = self.compare(names, self.folder / TRIALS, self.choosing, on_event=self.without_notes, loss_alone=True)
        losses = {run.key: _loss(run) for run in results.runs}
        return {
            arm: {power: [losses[self.at(arm, power), seed] for seed in self.choosing] for power in grid}
            for arm in self.configs
        }

    def without_notes(self, event: Event) -> None:
        """That every trial has a rate of its own need not be said of each; what is noted besides is of the verdict."""
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

    def announce(self, grid: Sequence[int], seconds: Mapping[str, float]) -> None:
        """Says what is to come; raises RequestError where it takes longer than it may."""
        left = {arm: max(0, len(grid) * TUNING_SEEDS + 2 * len(self.fresh) - self.ended(arm)) for arm in self.configs}
        beside = 1 if self.executor is None else self.executor.workers
        runs, whole = sum(left.values()), sum(seconds[arm] * count for arm, count in left.items()) / beside
        each = TUNING_SEEDS * sum(seconds.values()) / beside
        design = (
            f"{len(grid)} rates x {TUNING_SEEDS} seeds for each of {len(self.configs)} arms, then {len(self.fresh)} "
            "fresh seeds at the chosen and at the usual rates"
        )
        spent = (monotonic() - self.began) / 60
        if self.within is not None and spent + whole / 60 > self.within:
            needed = math.ceil(spent + whole / 60)
            raise RequestError(
                f"--within {self.within:g} minutes is too little: {design}, {runs} runs to come, take about "
                f"{_words(whole)}; what was trained is kept",
                code="range", field="within", value=self.within, expected=f"at least {needed}",
            )  # fmt: skip
        if runs:
            more = f"; {_words(each)} more for each rate that is added at an edge"
            self.notify(StageEvent(words=f"{design}: {runs} runs to come, about {_words(whole)}{more}"))

    def ended(self, arm: str) -> int:
        """Runs of an arm, at whatever rate, that are not to be trained again."""
        found = (read_results(place) for place in (self.folder / TRIALS, self.folder, self.folder / USUAL))
        runs = [run for results in found if results is not None for run in results.runs if run.status != "failed"]
        return sum(run.name == arm or run.name.startswith(f"{arm}+recipe.learning_rate=") for run in runs)

    def seconds(self) -> dict[str, float]:
        """What a run of each arm takes, as PROBE_STEPS of it were timed here, the start of its process and its measures
        included. They are kept for the next time."""
        path = self.folder / TRIALS / PROBE
        paces = _read_paces(path)
        if missing := [arm for arm in self.configs if arm not in paces]:
            self.notify(StageEvent(words=f"timing {PROBE_STEPS} steps of each arm"))
            paces = {**paces, **self.probed(missing)}
            replace_text(path, json.dumps(paces))
        return {arm: self.takes(arm, *paces[arm]) for arm in self.configs}

    def takes(self, arm: str, seconds_per_token: float, besides: float) -> float:
        plan = self.plans[arm]
        steps = plan.num_steps(self.configs[arm])
        if steps is None:
            return besides + 60 * (plan.minutes or 0.0)
        return besides + steps * plan.tokens_per_step * seconds_per_token

    def probed(self, missing: Sequence[str]) -> dict[str, tuple[float, float]]:
        """Arm -> (seconds per token of its steps, seconds of a run besides)."""
        clock: dict[str, float] = {}

        def watch(event: Event) -> None:
            if isinstance(event, Start):
                clock[event.name] = -monotonic()
            elif isinstance(event, End):
                clock[event.name] = clock.get(event.name, -monotonic()) + monotonic()

        plan = next(iter(self.plans.values()))
        tokens = PROBE_STEPS * plan.tokens_per_step
        budget = dict.fromkeys(("minutes", "flops", "steps", "match"))
        with tempfile.TemporaryDirectory() as place:
            results = Results.of(
                compare(
                    missing, self.text, **{**self.given, **budget, "tokens": tokens, "allow_unmatched": True},
                    seed=self.choosing.start, out=place, on_event=watch, executor=self.executor,
                    loss_alone=True,
                )
            )  # fmt: skip
        _refuse_failed(results.runs, self.folder)
        found = {}
        for run in results.runs:
            assert run.train is not None  # it has not failed
            each = 1 / run.train.tokens_per_second if run.train.tokens_per_second else 0.0
            found[run.name] = (each, max(0.0, clock.get(run.name, 0.0) - tokens * each))
        return found

    # What is left

    def tuning(self, curves: Mapping[str, Curve], choices: Mapping[str, Choice], trials: Results) -> Tuning:
        grid = len(next(iter(curves.values())))
        return Tuning(
            arms=[self.tuned_arm(arm, curves[arm], choices[arm], trials) for arm in self.configs],
            budget=_budget(trials),
            seeds=list(self.choosing),
            fresh=list(self.fresh),
            extended=grid - len(START),
            runs={"choosing": len(trials.runs)},
            minutes={"choosing": _minutes(trials)},
        )

    def tuned_arm(self, arm: str, curve: Curve, choice: Choice, trials: Results) -> TunedArm:
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
            tuned_as=self.at(arm, choice.power),
        )

    def of(self, run: RunResult, arm: str) -> bool:
        return run.name.startswith(f"{arm}+recipe.learning_rate=")

    def draw(self, found: Tuning) -> None:
        write_tuning(found, self.command, self.folder / PAGE)


def _loss(run: RunResult) -> float:
    """Of a trial: infinite where the run diverged."""
    return run.validation.loss if run.status == "ok" and run.validation is not None else math.inf


def _refuse_failed(runs: Sequence[RunResult], folder: Path) -> None:
    """Raises WorkError for a run that neither ended nor diverged: trials must be equal."""
    if failed := [run for run in runs if run.status == "failed"]:
        one = failed[0]
        raise WorkError(
            f"{len(failed)} of {len(runs)} runs failed: {one.name} seed {one.seed}: {one.error}; what is finished is "
            f"in {folder}, and the same command goes on from here",
            code="failed",
        )  # fmt: skip


def _with_losses(arm: TunedArm, tuned: Results, usual: Results) -> TunedArm:
    name = arm.name if usual is not tuned else arm.tuned_as
    return arm.changed(loss_chosen=_mean(tuned, arm.tuned_as), loss_usual=_mean(usual, name))


def _mean(results: Results, name: str) -> float | None:
    """None where a seed diverged."""
    losses = [_loss(run) for run in results.runs if run.name == name]
    mean = fmean(losses)
    return mean if math.isfinite(mean) else None


def _verdicts(results: Results, names: Mapping[str, str]) -> list[Verdict]:
    """With the arms named as they were asked for."""
    return [one.changed(a=names.get(one.a, one.a), b=names.get(one.b, one.b)) for one in results.verdicts]


def _minutes(results: Results) -> float:
    return sum(run.train.seconds for run in results.runs if run.train is not None) / 60


def _budget(results: Results) -> str:
    """Of each run, in words."""
    budget = results.budget
    amounts = {"tokens": budget.tokens, "FLOPs": budget.flops, "minutes": budget.minutes}
    return " and ".join(f"{amount:,.6g} {unit}" for unit, amount in amounts.items() if amount is not None)


def _words(seconds: float) -> str:
    """A duration that is estimated: two figures."""
    value, unit = next(
        ((seconds / size, unit) for size, unit in ((3600, "hours"), (60, "minutes")) if seconds >= 1.5 * size),
        (seconds, "seconds"),
    )
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def _listed(seeds: range) -> str:
    return f"{seeds.start} to {seeds[-1]}"


def _read_paces(path: Path) -> dict[str, tuple[float, float]]:
    """What `seconds` has kept; {} where that cannot be read."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return {str(arm): (float(each), float(besides)) for arm, (each, besides) in tree.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _call(expressions: Sequence[str], data: object, given: dict[str, Any], seeds: int, out: str | Path) -> str:
    """The command, or the call in Python, that repeats this."""
    told = command_of(expressions, data, given, seeds=seeds, out=str(out))
    if told.startswith("glassformer compare"):
        return f"{told} --tune"
    return told.replace("gf.compare(", "gf.tune(", 1)
