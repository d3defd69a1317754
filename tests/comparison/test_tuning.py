"""Learning rates chosen by trials: on a simulated basin, whose best rate and floor are known, and once for real."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import glassformer as gf
from glassformer.cli import main
from glassformer.comparison import rates as rates_module
from glassformer.comparison import summary
from glassformer.comparison import tuning as tuning_module
from glassformer.comparison.rates import (
    EXTENSIONS,
    FACTOR,
    START,
    TUNING_SEEDS,
    best,
    choose,
    search,
    sensitivity,
    wider,
)
from glassformer.errors import Code, WorkError
from glassformer.naming import preset
from glassformer.report.tuning import finding
from glassformer.runs.events import Event, StageEvent
from glassformer.runs.executor import Local
from glassformer.runs.results import Results, RunResult
from glassformer.runs.verdicts import verdicts
from glassformer.training import Interrupted, default_learning_rate
from glassformer.training.pace import StepPace
from tests.refused import failed, refused
from tests.runs.stand_in import AT_ONCE, Instead, Stand, content, trained_at_once

compare, tune = content(gf.compare), content(gf.tune)

A = "gpt2@1m+layers=1+d_model=32+heads=2"
B, C = f"{A}+rope", f"{A}+rmsnorm"
PLAN: dict[str, Any] = {"tokens": 6 * 4 * 32, "batch_size": 4, "context": 32, "threads": 1, "dtype": "float32"}
USUAL = {arm: float(f"{default_learning_rate(preset(arm)):.3g}") for arm in (A, B, C)}
"""Expression -> learning rate of the rule, rounded as in expressions."""


@dataclass
class Basin:
    """loss = floor + bend * (log2(rate / usual) - best)^2 + noise; from `edge` powers on the run diverges."""

    floor: float
    best: float = 0.0
    bend: float = 0.02
    noise: float = 0.0
    edge: float = math.inf

    def loss(self, power: float, chance: float) -> float:
        if power >= self.edge:
            return math.inf
        return self.floor + self.bend * (power - self.best) ** 2 + self.noise * chance


@dataclass
class Simulated:
    """In place of the process that trains a run: its loss is that of the arm's basin."""

    basins: dict[str, Basin]
    stop_after: int | None = None
    runs: list[tuple[str, int]] = field(default_factory=list)

    def __call__(self, place: Path, notify: Any) -> tuple[str | None, int]:
        if len(self.runs) == self.stop_after:
            raise KeyboardInterrupt
        trained_at_once(place, notify)
        result = json.loads((place / "result.json").read_text())
        name, seed = result["name"], result["seed"]
        self.runs.append((name, seed))
        arm = name.split("+recipe.learning_rate=")[0]
        power = math.log2(result["recipe"]["learning_rate"] / USUAL[arm])
        loss = self.basins[arm].loss(power, random.Random(name + str(seed)).gauss(0, 1))
        result["train"]["curve"] = [[128, 5.0]]
        if math.isinf(loss):
            result |= {"status": "diverged", "error": "the loss is not finite", "validation": None}
        else:
            result["validation"] |= {"loss": loss, "perplexity": math.exp(loss)}
        (place / "result.json").write_text(json.dumps(result))
        return None, 0

    @property
    def executor(self) -> Instead:
        return Instead(self)


DECEPTIVE = {A: Basin(3.0, noise=0.004), B: Basin(2.95, best=2.1, noise=0.004)}
"""B is better by 0.05 at its own best rate, and worse by 0.038 at the usual one."""


@pytest.fixture(autouse=True)
def _without_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page for each of some thirty runs takes longer than all the rest; `deceived` writes its own."""
    monkeypatch.setattr(summary, "write_report", lambda results, path: path)


@pytest.fixture(autouse=True, scope="module")
def _paced() -> Iterator[None]:
    """In place of timed steps: 128 tokens a second, so that a run of 768 tokens takes 6 s, and 2 s to start."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            tuning_module, "paces", lambda models, text, steps: dict.fromkeys(models, StepPace((1.0,), 128))
        )
        patched.setattr(tuning_module, "evaluated", lambda recipe, text: 0)
        yield


# Choosing


def test_the_choice_is_the_minimum_of_the_parabola() -> None:
    losses = {-1: [2.31, 2.33], 0: [2.22, 2.20], 1: [2.25, 2.27]}
    powers, means = zip(*((power, np.mean(two)) for power, two in losses.items()), strict=True)
    a, b, _ = np.polyfit(powers, means, 2)
    found = choose(losses)
    assert found.power == pytest.approx(-b / (2 * a)) and found.between and found.settled and found.best == 0


def test_no_parabola_through_a_diverged_or_missing_rate() -> None:
    assert choose({-1: [2.5], 0: [2.2], 1: [math.inf]}).power == 0
    assert choose({-1: [2.5], 0: [2.2], 1: [math.inf]}).settled
    edge = choose({-1: [2.5, 2.5], 0: [2.2, 2.3], 1: [2.1, 2.1]})
    assert edge.power == 1 and not edge.settled and not edge.between


def test_one_seed_that_diverged_makes_its_rate_the_worst() -> None:
    assert best({0: [2.2, 2.2], 1: [1.0, math.inf]}) == 0


def test_of_equal_rates_the_lower_is_chosen() -> None:
    assert best({1: [2.0], 0: [2.0], 2: [2.0]}) == 0


def test_a_grid_grows_on_the_side_of_a_best_rate_for_all_arms() -> None:
    curves = {"a": {-1: [2.0], 0: [2.1], 1: [2.2]}, "b": {-1: [2.2], 0: [2.0], 1: [2.2]}}
    assert wider(curves) == [-2, -1, 0, 1]
    assert wider({**curves, "c": {-1: [2.2], 0: [2.1], 1: [2.0]}}) == [-2, -1, 0, 1, 2]
    assert wider({"b": curves["b"]}) == [-1, 0, 1]


@pytest.mark.parametrize("other", [{-1: [2.0], 0: [1.9]}, {-1: [2.0], 0: [1.9], 1: [2.0, 2.0]}])
def test_unequal_trials_are_an_error(other: dict[int, list[float]]) -> None:
    with pytest.raises(ValueError, match="tried unequally"):
        wider({"a": {-1: [2.0], 0: [1.9], 1: [2.0]}, "b": other})


def measured(basins: dict[str, Basin], chance: Callable[[], float]) -> Callable[[list[int]], Any]:
    """Returns the measuring function for `search`, which draws the loss of every (arm, power, seed) once."""
    held: dict[tuple[str, int, int], float] = {}

    def measure(grid: list[int]) -> Any:
        for arm, power, seed in itertools.product(basins, grid, range(TUNING_SEEDS)):
            if (arm, power, seed) not in held:
                held[arm, power, seed] = basins[arm].loss(power, chance())
        return {arm: {p: [held[arm, p, seed] for seed in range(TUNING_SEEDS)] for p in grid} for arm in basins}

    return measure


def test_the_search_ends_where_a_basin_has_no_bottom() -> None:
    curves = search(measured({A: Basin(3.0), B: Basin(3.0, best=50)}, lambda: 0.0))
    assert [sorted(curve) for curve in curves.values()] == 2 * [list(range(-1, 2 + EXTENSIONS))]
    assert choose(curves[A]).settled and not choose(curves[B]).settled


def run_of(name: str, seed: int, loss: float) -> RunResult:
    found = {"loss": loss, "perplexity": 1.0, "bits_per_byte": None, "tokens": 1}
    return RunResult.of({"name": name, "seed": seed, "status": "ok", "validation": found})


def test_tuned_verdict_is_correct_and_untuned_is_wrong() -> None:
    """300 simulated comparisons: noise of 0.3 %, 3 fresh seeds; the better arm is better by 1.7 % at its own best rate
    and worse by 1.3 % at the usual one."""
    chance = random.Random(0)
    right = wrong = 0
    basins = {A: Basin(3.0, noise=0.008), B: Basin(2.95, best=2.1, noise=0.008)}
    for _ in range(300):
        curves = search(measured(basins, lambda: chance.gauss(0, 1)))
        chosen = {arm: choose(curve).power for arm, curve in curves.items()}
        tuned, usual = (
            verdicts([
                run_of(arm, seed, basins[arm].loss(power[arm], chance.gauss(0, 1)))
                for arm in basins for seed in (2, 3, 4)
            ])
            for power in (chosen, dict.fromkeys(basins, 0.0))
        )  # fmt: skip
        right += [one.verdict for one in tuned] == ["b better"]
        wrong += [one.verdict for one in usual] == ["a better"]
    assert right >= 270 and wrong >= 200, (right, wrong)


def test_sensitivity_is_wortsmans_mean_excess() -> None:
    curve = {-1: [2.4, 2.6], 0: [2.0, 2.0], 1: [math.inf, 2.2]}
    assert sensitivity(curve, start=4.0) == pytest.approx((0.4 + 0.6 + 0 + 0 + 2.0 + 0.2) / 6)
    assert sensitivity({0: [2.0], 1: [2.0]}, 4.0) == 0


# The whole, simulated


@pytest.fixture(scope="module")
def deceived(
    source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path, Simulated, list[Event]]:
    out, simulated = tmp_path_factory.mktemp("tuned") / "out", Simulated(DECEPTIVE)
    told: list[Event] = []
    results = tune([A, B], source, out=out, executor=simulated.executor, progress=told.append, **PLAN)
    return results, out, simulated, told


def test_tuning_reverses_the_verdict_at_the_usual_rate(deceived: Any) -> None:
    results, *_ = deceived
    tuning = Results.of(results).tuning
    assert tuning is not None
    assert [one.verdict for one in tuning.tuned] == ["b better"]
    assert [one.verdict for one in tuning.usual] == ["a better"]
    assert {tuning.tuned[0].a, tuning.tuned[0].b} == {A, B}
    a, b = tuning.arms
    assert a.chosen == pytest.approx(USUAL[A], rel=0.1) and b.chosen == pytest.approx(USUAL[B] * 2**2.1, rel=0.1)
    assert {A: a.usual, B: b.usual} == {arm: USUAL[arm] for arm in (A, B)} and b.between and b.settled
    assert b.loss_chosen == pytest.approx(2.95, abs=0.01)
    assert b.loss_usual == pytest.approx(2.95 + 0.02 * 2.1**2, abs=0.01)
    assert finding(tuning).startswith("The learning rate decided.")
    assert "768 tokens a run, 3 fresh seeds" in finding(tuning)


def test_every_arm_has_the_same_trials_on_the_same_seeds(deceived: Any) -> None:
    results, *_ = deceived
    tried = [
        [(trial["power"], trial["rate"], trial["seed"]) for trial in arm["trials"]] for arm in results["tuning"]["arms"]
    ]
    powers = range(START[0], START[-1] + results["tuning"]["extended"] + 1)
    for arm, trials in zip((A, B), tried, strict=True):
        rates = {p: float(f"{default_learning_rate(preset(arm)) * FACTOR**p:.3g}") for p in powers}
        assert trials == [(p, rates[p], seed) for p in powers for seed in (0, 1)]
    assert results["tuning"]["extended"] == 2  # the best of B is at 2.1, so 3 was needed


def test_verdicts_are_of_seeds_that_no_rate_was_chosen_on(deceived: Any) -> None:
    results, out, simulated, _ = deceived
    assert {run["seed"] for run in results["runs"]} == {2, 3, 4} == set(results["tuning"]["fresh"])
    assert results["tuning"]["seeds"] == [0, 1]
    usual = json.loads((out / "usual" / "results.json").read_text())
    assert {run["seed"] for run in usual["runs"]} == {2, 3, 4} and {run["name"] for run in usual["runs"]} == {A, B}
    counts = results["tuning"]["runs"]
    assert counts == {"choosing": 20, "tuned": 6, "usual": 6}
    assert len(simulated.runs) == sum(counts.values())


def test_pages_draw_the_curves_and_both_verdicts(deceived: Any) -> None:
    results, out, *_ = deceived
    assert json.loads((out / "results.json").read_text()) == results
    assert results["title"] == f"{A} and {B} on text.txt, each at its own learning rate"
    assert results["command"] == f"glassformer run {out / 'design.yaml'}"
    assert gf.Design.from_file(out / "design.yaml").tune
    for page in (out / "report.html", out / "tuning.html"):
        text = page.read_text()
        assert 'id="tuning"' in text and "Validation loss against learning rate" in text
        assert text.count("they differ") == 1 and "The learning rate decided." in text


def test_cost_of_tuning_is_printed_before(deceived: Any) -> None:
    *_, told = deceived
    first, second, *_ = [event.words for event in told if isinstance(event, StageEvent)]
    assert first == "timing 12 steps of each arm"
    # 12 trials and 12 verdict runs of 8 s
    assert second.startswith("3 rates x 2 seeds for each of 2 arms, then 3 fresh seeds")
    assert "24 runs to come, about 3.2 minutes; 32 seconds more for each rate" in second


def test_repeated_call_resumes_and_adds_seeds(source: Path, tmp_path: Path) -> None:
    def once(simulated: Simulated, **more: Any) -> dict[str, Any]:
        options = {**PLAN, "seeds": 2, "looks": [2, 3], **more}
        return tune([A, B], source, out=tmp_path / "out", executor=simulated.executor, **options)

    trained: list[tuple[str, int]] = []
    for stop in (7, 10):  # in the grid, and behind it
        simulated = Simulated(DECEPTIVE, stop_after=stop)
        with pytest.raises((Interrupted, KeyboardInterrupt)):
            once(simulated)
        trained += simulated.runs
    rest = Simulated(DECEPTIVE)
    results = once(rest)
    trained += rest.runs
    assert len(trained) == len(set(trained)) == sum(results["tuning"]["runs"].values())  # none twice
    again = Simulated(DECEPTIVE)
    assert once(again)["tuning"] == results["tuning"] and again.runs == []
    more = Simulated(DECEPTIVE)
    assert once(more, seeds=3)["tuning"]["fresh"] == [2, 3, 4]
    assert {seed for _, seed in more.runs} == {4} and len(more.runs) == 4
    third = Simulated({**DECEPTIVE, C: Basin(3.1)})
    arms = tune([A, B, C], source, out=tmp_path / "out", executor=third.executor, **PLAN)["tuning"]["arms"]
    assert [arm["name"] for arm in arms] == [A, B, C] and len(arms[2]["trials"]) == len(arms[0]["trials"])
    assert {name.split("+recipe.")[0] for name, _ in third.runs} == {C} and len(third.runs) == 2 * 5 + 2 * 3


def test_verdicts_remain_while_seeds_are_added(source: Path, tmp_path: Path) -> None:
    """Stopped in between, pages and results still have those there were."""
    basins = {A: Basin(2.0, best=1.0), B: Basin(1.9, best=1.0)}
    tune([A, B], source, seeds=2, out=tmp_path, executor=Simulated(basins).executor, **PLAN)
    with pytest.raises(Interrupted):
        tune([A, B], source, seeds=3, out=tmp_path, executor=Simulated(basins, stop_after=1).executor, **PLAN)
    held = Results.of(json.loads((tmp_path / "results.json").read_text())).tuning
    assert held is not None and len(held.tuned) == len(held.usual) == 1 and len(held.fresh) == 2
    assert "better" in (tmp_path / "tuning.html").read_text()
    found = tune([A, B], source, seeds=3, out=tmp_path, executor=Simulated(basins).executor, **PLAN)
    assert len(found["tuning"]["fresh"]) == 3


def test_divergence_is_the_worst_loss(source: Path, tmp_path: Path) -> None:
    basins = {A: Basin(3.0), B: Basin(2.95, best=3.0, edge=0.9)}  # the better the higher, until it diverges
    results = tune([A, B], source, out=tmp_path / "out", seeds=2, executor=Simulated(basins).executor, **PLAN)
    _, b = Results.of(results).tuning.arms  # type: ignore[union-attr]
    assert b.chosen == USUAL[B] and not b.between and b.settled
    assert [trial.loss for trial in b.trials if trial.power == 1] == [None, None]
    assert "2 of 2 diverged at 0.00384" in (tmp_path / "out" / "tuning.html").read_text()


def test_usual_rates_that_are_the_best_are_not_trained_again(source: Path, tmp_path: Path) -> None:
    basins = {A: Basin(3.0), B: Basin(2.9)}
    results = tune([A, B], source, out=tmp_path / "out", seeds=2, executor=Simulated(basins).executor, **PLAN)
    tuning = Results.of(results).tuning
    assert tuning is not None and tuning.runs["usual"] == 0 and tuning.tuned == tuning.usual
    assert not (tmp_path / "out" / "usual").exists() and finding(tuning).startswith("Tuning changed no verdict.")


# Refusals


@pytest.mark.parametrize(
    ("basin", "says"),
    [
        (Basin(2.9, best=30), "does best at {high}, the highest of the 4 rates that each arm was tried at"),
        (Basin(2.9, best=-30), "does best at {low}, the lowest of the 4 rates"),
        (Basin(2.9, edge=-30), "diverged at {low} and every other of the 4 rates"),
    ],
)
def test_a_best_rate_at_the_edge_is_refused(
    basin: Basin, says: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one extension; `test_the_search_ends_where_a_basin_has_no_bottom` has all."""
    monkeypatch.setattr(rates_module, "EXTENSIONS", 1)
    monkeypatch.setattr(tuning_module, "EXTENSIONS", 1)
    rate = default_learning_rate(preset(B))
    sentence = re.escape(says.format(high=f"{4 * rate:.3g}", low=f"{rate / 4:.3g}"))
    with pytest.raises(WorkError, match=sentence) as no:
        tune([A, B], source, out=tmp_path, executor=Simulated({A: Basin(3.0), B: basin}).executor, **PLAN)
    assert "no verdict is measured" in str(no.value)
    assert "Lowest at an edge" in (tmp_path / "tuning.html").read_text() and not (tmp_path / "results.json").exists()


@pytest.mark.parametrize(
    ("expressions", "options", "code", "field"),
    [
        ([A, B], {"learning_rate": 1e-3}, "conflict", "learning_rate"),
        ([A, f"{B}+recipe.learning_rate=1e-3"], {}, "conflict", "recipe.learning_rate"),
        ([A, B], {"seeds": 1}, "range", "seeds"),
        ([A, B], {"within": 0}, "range", "within"),
        ([A, B], {"within": math.nan}, "range", "within"),
        ([A, B], {"minutes": 1.0}, "conflict", "budget"),
        ([A, B], {"looks": [1]}, "range", "looks"),
        ([A, A], {}, "conflict", "models"),
        (["gpt2@1m", "gpt2@3m"], {}, "conflict", "allow_unmatched"),
        ([A, B], {"out": ""}, "missing", "out"),
    ],
)
def test_wrong_requests_are_refused_before_anything_is_trained(
    expressions: list[str], options: dict[str, Any], code: Code, field: str, source: Path, tmp_path: Path
) -> None:
    with refused(code=code, field=field):
        tune(expressions, source, executor=AT_ONCE, **{"out": tmp_path / "out", **PLAN, **options})
    assert not (tmp_path / "out").exists()


def test_too_little_time_is_refused_with_the_time_it_takes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = Simulated(DECEPTIVE)
    with refused(code="range", field="within") as no:
        tune([A, B], source, out=tmp_path, within=2, executor=simulated.executor, **PLAN)
    assert simulated.runs == [] and no.value.expected == "at least 4"
    monkeypatch.setattr(tuning_module, "paces", None)  # the steps that were timed are kept
    results = tune([A, B], source, out=tmp_path, within=4, executor=simulated.executor, **PLAN)
    assert results["tuning"]["extended"] == 2


def test_time_on_other_machines_is_not_limited(source: Path, tmp_path: Path) -> None:
    elsewhere = Simulated(DECEPTIVE).executor
    elsewhere.here = False
    with refused(code="conflict", field="within"):
        tune([A, B], source, out=tmp_path, within=100, executor=elsewhere, **PLAN)
    told: list[Event] = []
    tune([A, B], source, out=tmp_path, executor=elsewhere, progress=told.append, **PLAN)
    assert next(event.words for event in told if isinstance(event, StageEvent)).endswith("24 runs to come")


def test_an_extension_beyond_the_time_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a simulated clock of 8 s per run, 20 runs are within 2.8 minutes, 24 are not."""
    simulated = Simulated({A: Basin(3.0), B: Basin(3.0, best=4.2)})
    monkeypatch.setattr(tuning_module, "monotonic", lambda: 8.0 * len(simulated.runs))
    with refused(code="range", field="within"):
        tune([A, B], source, out=tmp_path, within=2.8, seeds=2, executor=simulated.executor, **PLAN)
    assert len(simulated.runs) == 12  # the first grid


def test_seeds_of_the_trials_are_never_those_of_a_verdict(source: Path, tmp_path: Path) -> None:
    flat = {A: Basin(3.0), B: Basin(2.9)}
    tune([A, B], source, out=tmp_path / "out", seeds=2, executor=Simulated(flat).executor, **PLAN)
    with refused(code="conflict", field="seed"):
        tune([A, B], source, out=tmp_path / "out", seeds=2, seed=1, executor=Simulated(flat).executor, **PLAN)


def test_a_folder_of_an_untuned_comparison_is_refused(source: Path, tmp_path: Path) -> None:
    compare([A, B], source, out=tmp_path / "out", executor=AT_ONCE, **PLAN)
    with refused(code="exists", field="out"):
        tune([A, B], source, out=tmp_path / "out", executor=AT_ONCE, **PLAN)


def test_a_run_that_failed_ends_the_trials(source: Path, tmp_path: Path) -> None:
    with failed(code="failed"):
        tune([A, B], source, out=tmp_path, executor=Instead(lambda place, notify: ("no memory", 1)), **PLAN)


# The command line, the page, and once for real


def options(source: Path, out: Path) -> list[str]:
    plan = ["--tokens", "768", "--batch-size", "4", "--context", "32", "--threads", "1", "--dtype", "float32"]
    return ["--data", str(source), "--out", str(out), *plan]


def test_the_command_line_tunes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = Simulated(DECEPTIVE)
    monkeypatch.setattr(Local, "training", lambda self, place: Stand(simulated, place))
    assert main(["compare", A, B, "--tune", *options(source, tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "The learning rate decided." in " ".join(said.out.split()) and "sensitivity" in said.out
    assert "24 runs to come" in " ".join(said.err.split())
    assert main(["compare", A, B, "--tune", "--json", *options(source, tmp_path / "out")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["tuning"]["fresh"] == [2, 3, 4]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--tune", "--lr", "1e-3"], "fixes the learning rate"),
        (["--tune", "--seeds", "1"], "gives no verdict"),
        (["--within", "3"], "--within is for --tune"),
        (["--tune", "--power", "1%"], "--power is for a comparison without --tune"),
    ],
)
def test_the_command_line_refuses(
    more: list[str], says: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", A, B, *more, *options(source, tmp_path / "out")]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_tuned_comparison_for_real(source: Path, tmp_path: Path) -> None:
    """Some 30 processes of a model of 13k parameters."""
    plan = {**PLAN, "tokens": 60 * 4 * 32}
    results = tune([A, B], source, out=tmp_path / "out", seeds=2, **plan)
    tuning = Results.of(results).tuning
    assert tuning is not None and len(tuning.tuned) == len(tuning.usual) == 1
    for arm in tuning.arms:
        assert arm.settled and len(arm.trials) == TUNING_SEEDS * (len(START) + tuning.extended)
        assert arm.loss_chosen is not None and arm.loss_usual is not None
        assert arm.loss_chosen < arm.loss_usual + 0.1
