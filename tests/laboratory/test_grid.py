"""Laws of models from the command to the page: on losses that a planted law gives at once, and on a few real steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import glassformer as gf
from glassformer.cli import main
from glassformer.comparison.arms import DesignArm
from glassformer.config import read_tree
from glassformer.errors import Code
from glassformer.laboratory import estimate, scaling
from glassformer.laboratory import law as law_module
from glassformer.laboratory.grid import grid
from glassformer.laboratory.law import fit_scaling_law
from glassformer.laboratory.points import points
from glassformer.naming import SIZES, at_size, preset, shape, without_size
from glassformer.runs import slurm
from glassformer.runs.events import End, Kept, Notify, PlanEvent, silent
from glassformer.runs.files import write_result
from glassformer.runs.request import RunRequest
from glassformer.runs.results import RunResult
from glassformer.training import Interrupted
from glassformer.training.pace import StepPace
from tests.refused import failed, refused
from tests.runs.stand_in import Instead

PLANTED = {
    "gpt2": {"E": 1.2, "A": 25.0, "B": 60.0, "alpha": 0.25, "beta": 0.30},
    "llama": {"E": 1.2, "A": 25.0, "B": 60.0, "alpha": 0.29, "beta": 0.30},
}
SMALL: dict[str, Any] = {"batch_size": 4, "context": 32, "threads": 1, "dtype": "float32", "device": "cpu"}
SIZES_ASKED, BUDGETS = "0.05m..0.8m", "16384..262144"
FEW: dict[str, Any] = {"sizes": "0.05m,0.2m,0.8m", "budgets": "16384,65536,262144"}
"""The fewest that carry the law and a run held out."""


def law_of(name: str, params: float, tokens: float) -> float:
    law = PLANTED[without_size(name).partition("+")[0]]
    return law["E"] + law["A"] * params ** -law["alpha"] + law["B"] * tokens ** -law["beta"]


class Planted:
    """An executor whose runs end at once, with the loss of a planted law; `trained` are those that it was given."""

    workers, shared, here = 1, False, True

    def __init__(self, diverged: Sequence[str] = (), stop_after: int | None = None):
        self.diverged, self.stop_after = diverged, stop_after
        self.trained: list[tuple[str, str]] = []

    def run(self, requests: Sequence[RunRequest], folder: Path, notify: Notify = silent) -> Iterator[RunResult]:
        for request in requests:
            if self.stop_after == len(self.trained):
                raise Interrupted("stopped", code="stopped")
            self.trained.append((folder.name, request.name))
            result = self.result(request, folder)
            request.place(folder).mkdir(parents=True, exist_ok=True)
            write_result(result, request.place(folder))
            notify(End(name=request.name, seed=request.seed, result=result))
            yield result

    def result(self, request: RunRequest, folder: Path) -> RunResult:
        config, recipe = request.config, request.recipe
        tokens = (recipe.num_steps(config) or 0) * recipe.tokens_per_step
        params = config.num_params(embeddings=False)
        bad = f"{request.name} {folder.name}" in self.diverged
        loss = None if bad else law_of(request.name, params, tokens)
        train = {"steps": 1, "tokens": tokens, "seconds": 1.0, "tokens_per_second": 1e3, "peak_memory_bytes": None,
                 "learning_rate": 1e-3, "curve": [], "curve_seconds": [], "validation_curve": []}  # fmt: skip
        return RunResult.of({
            "name": request.name, "seed": request.seed, "parameters": config.num_params(),
            "parameters_without_embeddings": params, "flops_per_token": 3 * config.flops(recipe.context),
            "config": request.identity["config"], "recipe": request.identity["recipe"], "train": train,
            "validation": None if bad else {"loss": loss, "perplexity": 1.0, "bits_per_byte": 1.0, "tokens": 5},
            "generation": None if bad else {"tokens_per_second": 1.0, "seconds_per_token": 1.0,
                                            "state_bytes_per_token": 1.0, "sample": {"text": "x"}},
            "extrapolation": [], "dynamics": {}, "machine": {},
            "status": "diverged" if bad else "ok", "error": "the loss is not finite" if bad else None,
        })  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n".join(f"line {n} of a small text about cats and trees" for n in range(800)))
    return path


@pytest.fixture(autouse=True)
def _quick(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is probed and few draws are taken."""
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(law_module, "DRAWS", 12)
    monkeypatch.setattr(scaling, "rates", lambda configs, text, recipe: dict.fromkeys(configs, 1e4))


def trained(source: Path, out: Path, executor: Any = None, **changes: Any) -> Any:
    asked = {"sizes": SIZES_ASKED, "budgets": BUDGETS, "executor": executor or Planted(), **SMALL, **changes}
    return gf.scale(asked.pop("models", ["gpt2", "llama"]), source, out=out, **asked)


def test_laws_of_a_config_are_those_of_its_expression(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Runs, laws and what is repeated from the file, all but the name."""
    monkeypatch.setitem(PLANTED, "mine", PLANTED["gpt2"])
    runs = {}
    for name, models in (("gpt2", ["gpt2"]), ("mine", {"mine": preset("gpt2")})):
        found = trained(source, tmp_path / name, models=models, **FEW)
        assert {run.model for run in found.runs} == {name} == {law.model for law in found.laws}
        runs[name] = [replace(run, model="") for run in found.runs]
        assert name in (tmp_path / name / "report.html").read_text()
    assert runs["gpt2"] == runs["mine"] and len(runs["mine"]) == 9
    held = scaling.ScalingDesign.from_dict(read_tree(tmp_path / "mine" / "design.yaml"))
    assert held == scaling.ScalingDesign.of({"mine": preset("gpt2")}, str(source), **FEW, **SMALL)


@pytest.mark.parametrize("name", ["gpt2", "gemma-2-2b", "t5", "mamba-130m", "mixtral-8x7b", "deepseek-v2-lite"])
def test_a_config_at_a_size_is_its_expression_at_the_size(name: str) -> None:
    text, value = (DesignArm.of("mine", one).at_size("0.3m") for one in (name, preset(name)))
    assert (text.name, text.config) == (value.name, value.config) and value.name == "mine@0.3m"


def test_models_without_a_name_are_numbered() -> None:
    laws = scaling.ScalingDesign.of([preset("gpt2@1m").build(0), preset("llama")], "x", **FEW, context=32)
    assert [arm.name for arm in laws.first.arms] == ["model 1@0.05m", "model 2@0.05m"]
    with refused(code="conflict", field="size"):
        scaling.ScalingDesign.of({"mine": "gpt2@1m"}, "x", **FEW)
    with refused(code="type", field="model"):
        scaling.ScalingDesign.of([3], "x", **FEW)  # type: ignore[list-item]


def planned(plans: list[scaling.ScalingPlan]) -> Any:
    """A listener that keeps the plans."""
    return lambda event: plans.append(event.plan) if isinstance(event, PlanEvent) else None


def test_a_planted_law_comes_back_from_the_whole_command(source: Path, tmp_path: Path) -> None:
    plans: list[scaling.ScalingPlan] = []
    found = trained(source, tmp_path, progress=planned(plans))
    assert found.status == "complete" and len(found.runs) == 50 == len(plans[0].runs)
    for law in found.laws:
        figures = law.values
        for name, value in PLANTED[law.model].items():
            assert figures[name] == pytest.approx(value, rel=1e-4), name
        assert law.held_out.error == pytest.approx(0, abs=1e-6)
        assert law.held_out.params == max(run.params for run in found.runs if run.model == law.model)
        assert law.beside.form == "kaplan" and abs(law.beside.held_out.error) > 1e-5
        assert law.budgets
        a = PLANTED[law.model]["beta"] / (PLANTED[law.model]["alpha"] + PLANTED[law.model]["beta"])
        assert getattr(law.allocation.parabolas, "a", a) == pytest.approx(a, abs=0.1)
    (pair,) = found.differences
    assert {one.name: one.difference for one in pair.figures}["alpha"] == pytest.approx(0.04, abs=1e-4)
    assert all(one.difference < 0 for one in pair.losses)
    page = (tmp_path / "report.html").read_text()
    for told in ("The largest run, predicted from the others", "Exponents", "llama differs from gpt2 in", "6 N D"):
        assert told in page
    assert json.loads((tmp_path / "scaling.json").read_text())["laws"] == found.to_dict()["laws"]
    # and the folder can be read as points of any fit
    law = fit_scaling_law(tmp_path, where={"model": "llama"})
    assert law.alpha == pytest.approx(0.29, rel=1e-4) and len(law.points) == 25
    with refused(code="missing", field="where"):
        fit_scaling_law(tmp_path)


def test_largest_run_is_left_out_of_the_fit_that_predicts_it(source: Path, tmp_path: Path) -> None:
    class Spoilt(Planted):
        def result(self, request: RunRequest, folder: Path) -> RunResult:
            found = super().result(request, folder)
            largest = request.name == "gpt2@0.8m" and "262144" in folder.name
            validation = found.validation
            assert validation is not None
            return (
                found.changed(validation=validation.model_copy(update={"loss": validation.loss * 1.1}))
                if largest
                else found
            )

    (law,) = trained(source, tmp_path, Spoilt(), models=["gpt2"], **FEW).laws
    assert law.held_out.error == pytest.approx(1 / 1.1 - 1, abs=1e-6)


def test_interrupted_grid_resumes_and_accepts_more_models(source: Path, tmp_path: Path) -> None:
    few = {**FEW, "models": ["gpt2"]}
    first = Planted(stop_after=5)
    with failed(code="stopped"):
        trained(source, tmp_path, first, **few)
    second, plans = Planted(), []
    trained(source, tmp_path, second, progress=planned(plans), **few)
    assert sorted(first.trained + second.trained) == sorted(set(first.trained + second.trained))
    assert sum(run.seconds > 0 for run in plans[0].runs) == len(second.trained) == 9 - 5
    third = Planted()
    found = trained(source, tmp_path, third, seeds=2, **few)
    assert len(third.trained) == 9 and len(found.runs) == 18
    kept: list[Any] = []
    trained(source, tmp_path, Planted(stop_after=0), seeds=2, progress=kept.append, **few)
    assert sum(isinstance(event, Kept) for event in kept) == 18
    for field, value in (("batch_size", 8), ("learning_rate", 1e-3)):
        with refused(code="conflict", field=field):
            trained(source, tmp_path, Planted(stop_after=0), seeds=2, **few, **{field: value})
    other = tmp_path / "other.txt"
    other.write_text("another text altogether, " * 2000)
    with refused(code="changed", field="out"):
        trained(other, tmp_path, Planted(stop_after=0), seeds=2, **few)


def test_runs_that_diverged_are_shown_and_left_out(source: Path, tmp_path: Path) -> None:
    lost = "gpt2@0.8m 0.8m-262144-tokens"
    found = trained(source, tmp_path, Planted([lost]), models=["gpt2"], **FEW)
    first = found.laws[0]
    assert first.lost == 1 and first.points == 8
    assert first.values["alpha"] == pytest.approx(0.25, rel=1e-4)
    page = (tmp_path / "report.html").read_text()
    assert "diverged: the loss is not finite; left out" in page and "1 run of gpt2 diverged or failed" in page
    assert points(tmp_path, where={"model": "gpt2"}).left_out == 1


def test_too_few_that_did_not_diverge(source: Path, tmp_path: Path) -> None:
    sizes = ("0.05m", "0.1m", "0.2m")
    lost = [f"gpt2@{size} {size}-{budget}-tokens" for size in sizes for budget in (16384, 32768)]
    found = trained(
        source, tmp_path, Planted(lost), models=["gpt2"], sizes=",".join(sizes), budgets="16384,32768,65536"
    )
    assert "3 points cannot fit the 5 figures" in found.laws[0].why
    with failed(code="failed"):
        found.check()


def test_budgets_of_equal_compute(source: Path, tmp_path: Path) -> None:
    """Tokens follow from the exact FLOPs of a token, and a budget is one though 6 N D is not."""
    plans: list[scaling.ScalingPlan] = []
    found = trained(source, tmp_path, budgets=None, isoflop="1e11,3e11,1e12", progress=planned(plans))
    for run in plans[0].runs:
        size = f"{run.model}@{run.size}"
        exact = 3 * preset(size).replace(vocab_size=found.data["vocab_size"], context=32).flops(32) * run.tokens
        assert run.flops == pytest.approx(exact) and run.flops == pytest.approx(float(run.cell.split("-")[1]), rel=0.15)
        assert run.approximate == 6 * run.params * run.tokens < run.flops
    assert any("6 N D" in note for note in plans[0].notes)
    for law in found.laws:
        assert not law.allocation.read_between and len(law.budgets) >= 2


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"models": ["gpt2@1m"]}, "conflict", "size"),
        ({"models": ["gpt2", "gpt2"]}, "conflict", "models"),
        ({"sizes": "0.1m"}, "range", "sizes"),
        ({"sizes": "0.1m,0.2m"}, "range", "sizes"),
        ({"budgets": "100k,200k"}, "range", "budgets"),
        ({"sizes": "0.1m,0.2m", "budgets": "16k,32k", "form": "kaplan"}, "range", "sizes"),
        ({"models": ["gpt2+layers=1+d_model=32+heads=2"]}, "conflict", "sizes"),
        ({"sizes": "0.8m,1m,3m"}, "conflict", "sizes"),
        ({"sizes": "0.1m,0.1m,1m"}, "conflict", "sizes"),
        ({"sizes": "1m..0.1m"}, "range", "sizes"),
        ({"sizes": "0.1m..1m:1"}, "range", "sizes"),
        ({"sizes": "0.1m,,1m"}, "missing", "sizes"),
        ({"sizes": "tiny,1m,3m"}, "unknown", "size"),
        ({"sizes": "2x,1m,3m"}, "unknown", "size"),
        ({"isoflop": "1e12"}, "conflict", "budgets"),
        ({"budgets": None}, "missing", "budgets"),
        ({"budgets": "0,1M,2M"}, "range", "budgets"),
        ({"form": "square"}, "unknown", "form"),
        ({"hours": 0.001}, "range", "hours"),
        ({"hours": -1}, "range", "hours"),
        ({"predict": [(1e9, 1e9)]}, "range", "far"),
        ({"flops": [1e20]}, "range", "far"),
        ({"form": "params", "flops": [1e12]}, "conflict", "flops"),
        ({"tokens": 5}, "conflict", "tokens"),
        ({"seeds": 0}, "range", "seeds"),
        ({"batch_size": 0}, "range", "batch_size"),
    ],
)  # fmt: skip
def test_invalid_grid_is_refused_before_training(
    changes: dict[str, Any], code: Code, field: str, source: Path, tmp_path: Path
) -> None:
    never = Planted(stop_after=0)
    with refused(code=code, field=field):
        trained(source, tmp_path / "out", never, **changes)
    assert never.trained == [] and not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("mine")
    with refused(code="exists", field="out"):
        trained(source, tmp_path)
    (tmp_path / "scaling.json").write_text("{")
    with refused(code="damaged", field="out"):
        trained(source, tmp_path)
    with refused(code="exists", field="out"):
        trained(source, tmp_path / "report.html" / "x")
    with refused(code="missing", field="data"):
        points(tmp_path)


def test_sizes_and_budgets_as_they_are_written() -> None:
    found = grid("1m..10m,0.3m,0.6m", "250k,1M..4M")
    assert found.sizes == ("0.3m", "0.6m", "1m", "2.15m", "4.64m", "10m")
    assert found.budgets == (250e3, 1e6, 2e6, 4e6)
    assert grid("0.1m..1.6m", "1k").sizes == ("0.1m", "0.2m", "0.4m", "0.8m", "1.6m")
    assert grid("0.1m..1.6m:3", "1k").sizes == ("0.1m", "0.4m", "1.6m")
    assert grid(["0.1m", "1m"], [1e6, 2e6]).budgets == (1e6, 2e6)
    assert grid("0.1m,1m", isoflop="1e13,3e13").cells[0].given == {"flops": 1e13}
    assert [cell.name for cell in grid("1m,0.1m", "1k").cells] == ["0.1m-1000-tokens", "1m-1000-tokens"]


@pytest.mark.parametrize("size", ["0.01m", "0.05m", "0.1m", "0.37m", "0.6m", "1.6m", "5m", "20m", "200m", "2b"])
def test_a_size_is_a_number_of_parameters(size: str) -> None:
    """12 L d^2 is near it, widths divide into heads of even width, and it builds."""
    layers, width, heads = shape(size)
    wanted = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert 12 * layers * width**2 == pytest.approx(wanted, rel=0.25)
    assert width % (2 * heads) == 0 and 16 <= width / heads <= 160
    assert preset(f"llama@{size}").num_params(embeddings=False) == pytest.approx(wanted, rel=0.3)


def test_sizes_grow_and_those_of_the_table_stay() -> None:
    counts = [
        12 * layers * width**2 for layers, width, _ in (shape(f"{m}m") for m in (0.02 * 1.3**i for i in range(50)))
    ]
    assert counts == sorted(counts)
    assert all(shape(name) == SIZES[name] for name in SIZES)
    assert at_size("llama+gqa:2", "0.3m") == "llama@0.3m+gqa:2" and without_size("llama@0.3m+gqa:2") == "llama+gqa:2"


def test_times_are_estimated_before_anything_is_trained(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From timed steps; a model left without time is estimated from its FLOPs."""
    from glassformer.text import prepare
    from glassformer.training import Recipe

    text = prepare(source, "auto", 32)
    recipe = Recipe.of(tokens=1, **SMALL)
    configs = {size: preset(f"gpt2@{size}").replace(vocab_size=text.tokenizer.vocab_size, context=32)
               for size in ("0.05m", "3m")}  # fmt: skip
    monkeypatch.setattr(estimate, "PROBE", 0.2)
    assert min(estimate.rates(configs, text, recipe).values()) > 0
    monkeypatch.setattr(estimate, "PROBE", 0.0)
    timed: list[Any] = []

    def once(models: dict[str, Any], *given: Any, **limit: Any) -> dict[str, StepPace]:
        timed.extend(models)
        return {name: StepPace((0.1,), 100) for name in models}

    monkeypatch.setattr(estimate, "paces", once)
    guessed = estimate.rates(configs, text, recipe)
    assert guessed["0.05m"] == 1000 and timed == ["0.05m"]
    assert guessed["0.05m"] / guessed["3m"] == pytest.approx(configs["3m"].flops(32) / configs["0.05m"].flops(32))


def test_the_command_trains(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "Local", lambda workers: Planted())
    base = ["scale", "gpt2", "llama", "--data", str(source), "--batch-size", "4", "--context", "32", "--threads", "1",
            "--dtype", "float32", "--out", str(tmp_path / "out")]  # fmt: skip
    asked = [*base, "--sizes", FEW["sizes"], "--budgets", FEW["budgets"]]
    assert main(asked) == 0
    printed = capsys.readouterr()
    told = " ".join((printed.out + printed.err).split())
    for words in ("18 of 18 runs are to be trained", "llama minus gpt2", "report:", "llama differs from gpt2"):
        assert words in told
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["laws"][1]["model"] == "llama"
    assert main(["scale", "--data", str(tmp_path / "out"), "--where", "model=gpt2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"] == 9
    for wrong, says in (
        (base, "give the sizes"),
        ([*asked, "--where", "a=b"], "are for a table of runs"),
        (["scale", "--data", str(source), "--sizes", "1m"], "--sizes is for training"),
        ([*asked, "--predict", "1b,1b"], "times the largest run's"),
    ):
        assert main(wrong) == 2
        assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_few_real_steps_from_end_to_end(source: Path, tmp_path: Path) -> None:
    """Two sizes, two budgets, trained in separate processes, whose start takes half a minute."""
    found = gf.scale(["gpt2"], source, sizes="0.05m,0.2m", budgets="512,2048", out=tmp_path, form="compute", **SMALL)
    assert [run.status for run in found.runs] == ["ok"] * 4
    losses = {(run.size, run.tokens): run.loss for run in found.runs}
    assert losses["0.2m", 2048] < losses["0.2m", 512] and all(math.isfinite(loss) for loss in losses.values())
    assert found.laws[0].points == 4 and (tmp_path / "report.html").is_file()
    again = gf.scale(["gpt2"], source, sizes="0.05m,0.2m", budgets="512,2048", out=tmp_path, form="compute",
                     executor=Instead(lambda place, notify: pytest.fail("trained again")), **SMALL)  # fmt: skip
    assert again.laws == found.laws
