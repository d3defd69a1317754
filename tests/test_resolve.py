"""Models, counts, dtypes and progress as every verb takes them; each is read in one place."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.cli import main
from glassformer.comparison.single import Course
from glassformer.loaded import Loaded
from glassformer.machine import dtype_of
from glassformer.model import Model
from glassformer.naming.chatting import loaded_as, state_dtype
from glassformer.naming.resolve import resolve
from glassformer.options import ModelOptions
from glassformer.runs.events import Begin, Event, ReadingEvent, Step, Wrote
from glassformer.runs.results import Sample
from glassformer.training import Recipe, pace
from glassformer.units import count
from tests.refused import refused

NAME = "llama@0.1m+layers=1+d_model=32+heads=2"
SHORT: dict[str, Any] = {"tokens": 4 * 4 * 16, "batch_size": 4, "context": 16, "threads": 1, "dtype": "float32"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(f"line {n} of a small text about cats and trees" for n in range(400)))
    return path


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    gf.train(NAME, text, SHORT, out=out, tokenizer="char")
    return out


def ways(run: Path) -> dict[str, Any]:
    config = gf.preset(NAME)
    config.save(run.parent / "model.yaml")
    return {
        "expression": NAME,
        "path": run.parent / "model.yaml",
        "config": config,
        "model": config.build(seed=0),
        "loaded": Loaded(config.build(seed=0), config, None),
    }


def test_a_config_is_named_in_every_way(run: Path) -> None:
    for way, model in ways(run).items():
        assert resolve(model) == gf.preset(NAME), way
        assert gf.plan(model, dtype="float32", context=16).weight_bytes == 4 * gf.preset(NAME).num_params(), way


def test_weights_are_named_in_every_way_that_has_some(run: Path) -> None:
    loaded = gf.load(run)
    for model in (run, str(run), loaded, loaded.model):
        found = resolve(model, weights=True)
        assert isinstance(found.model, Model) and found.config == loaded.config
    assert resolve(run, weights=True, dtype="bfloat16").model.embedding.weight.dtype == torch.bfloat16
    assert resolve(gf.load(run), weights=True, dtype=torch.bfloat16).model.embedding.weight.dtype == torch.bfloat16


def test_a_run_is_a_model_for_every_verb(run: Path, text: Path, tmp_path: Path) -> None:
    trained = gf.train(NAME, text, SHORT, tokenizer="char", progress=False)
    found = resolve(trained, weights=True)
    assert found.model is trained.model and resolve(trained) == trained.config
    assert gf.inspect(trained).config == trained.config
    assert gf.convert(trained, tmp_path / "hf", progress=False).family == gf.convert(
        trained.loaded, tmp_path / "same", progress=False
    ).family  # fmt: skip
    again = gf.train(trained, text, SHORT, pretrained=True, tokenizer="char", learning_rate=1e-9, progress=False)
    torch.testing.assert_close(again.model.embedding.weight, trained.model.embedding.weight, rtol=0, atol=1e-6)


def test_a_model_that_is_given_stays_as_it_is(run: Path) -> None:
    """Another dtype gives a copy, the same one gives the model itself."""
    loaded = gf.load(run)
    for model in (loaded, loaded.model):
        copied = resolve(model, weights=True, dtype="bfloat16")
        assert copied.model.dtype == torch.bfloat16 and copied.model is not loaded.model
        assert loaded.model.dtype == torch.float32
        assert resolve(model, weights=True, dtype=torch.float32, device="cpu").model is loaded.model


def test_how_a_model_is_run_is_read_in_one_way(run: Path) -> None:
    loaded = gf.load(run)
    verbs: list[Callable[..., Any]] = [
        partial(gf.load, run), partial(resolve, run, weights=True), partial(resolve, loaded, weights=True),
        partial(gf.chat, run, "Hi"), partial(gf.chat, loaded, "Hi"), lambda **how: loaded_as(run, ModelOptions(**how)),
    ]  # fmt: skip
    for verb in verbs:
        for code, field, wrong in (
            ("unknown", "dtype", "banana"), ("type", "dtype", 3), ("unsupported", "dtype", torch.int8),
            ("type", "device", 3), ("unsupported", "device", "banana"),
        ):  # fmt: skip
            with refused(code=code, field=field):  # type: ignore[arg-type]
                verb(**{field: wrong})
    for model in (run, loaded):
        for code, field, wrong in (
            ("unknown", "state_dtype", "int9"), ("unsupported", "state_dtype", torch.int32), ("type", "threads", "x"),
            ("type", "device", None),
        ):  # fmt: skip
            with refused(code=code, field=field):  # type: ignore[arg-type]
                gf.chat(model, "Hi", **{field: wrong})
    options = ModelOptions(dtype=torch.bfloat16, state_dtype=torch.int8)  # type: ignore[arg-type]
    assert loaded_as(run, options).model.dtype == torch.bfloat16 and state_dtype(options) == torch.int8


def test_invalid_path_or_format_is_refused(run: Path, tmp_path: Path) -> None:
    with refused(code="unknown", field="to"):
        gf.convert(run, tmp_path / "hf", to="onnx")  # type: ignore[arg-type]
    assert not (tmp_path / "hf").exists()
    with refused(code="type", field="reference"):
        gf.check(run, reference=gf.load(run), progress=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [None, 7, ["llama@1m"], torch.nn.Linear(2, 2)])
def test_values_that_are_not_models_are_refused(model: Any, text: Path) -> None:
    verbs = [resolve, lambda one: gf.train(one, text, SHORT), lambda one: gf.embed(one, ["a"])]
    for verb in [*verbs, *([] if isinstance(model, list) else [gf.plan])]:  # plan takes several models
        with refused(code="type", field="model"):
            verb(model)


def test_recipe_change_is_refused_without_training() -> None:
    for verb in (resolve, gf.plan, gf.inspect, gf.check):
        with refused(code="unsupported", field="recipe.warmup"):
            verb(f"{NAME}+recipe.warmup=0.1")


def test_a_config_has_no_weights() -> None:
    for verb in (lambda one: resolve(one, weights=True), lambda one: gf.embed(one, ["a"])):
        with refused(code="missing", field="model"):
            verb(gf.preset(NAME))


def test_a_model_is_trained_however_it_is_named(run: Path, text: Path) -> None:
    """Ways of naming one model give one run."""
    losses = {}
    for way, model in {**ways(run), "recipe": f"{NAME}+recipe.warmup=0.1"}.items():
        found = gf.train(model, text, SHORT, tokenizer="char", progress=False)
        losses[way] = found.validation["loss"]  # type: ignore[index]
    assert len({loss for way, loss in losses.items() if way != "recipe"}) == 1, losses
    by_name = gf.train(NAME, text, **{**SHORT, "tokens": "0.256k"}, tokenizer="char")
    assert by_name.validation["loss"] == losses["config"]  # type: ignore[index]


def test_training_starts_from_the_weights_of_a_loaded_model(run: Path, text: Path) -> None:
    loaded = gf.load(run)
    first: dict[str, float] = {}
    for way, model in {"path": run, "loaded": loaded}.items():
        found = gf.train(model, text, SHORT, pretrained=True)
        first[way] = next(row["loss"] for row in found.metrics if "loss" in row)
    drawn = gf.train(loaded, text, SHORT, tokenizer="char").metrics[0]["loss"]
    assert first["path"] == first["loaded"] < drawn
    with refused(code="missing", field="model"):
        gf.train(gf.preset(NAME), text, SHORT, pretrained=True)


def test_counts_are_numbers_or_text() -> None:
    assert [count(one) for one in (200_000, "200k", "200_000", "0.2M", 2e5)] == [200_000] * 5
    assert Recipe.of(tokens="200k") == Recipe.of(tokens=200_000) and Recipe.of(flops="1e12").flops == 1e12
    for wrong in ("1.5", 1.5, "many", True, None):
        with refused(code="type", field="tokens"):
            count(wrong, "tokens")
    with refused(code="type", field="tokens"):
        Recipe.of(tokens="many")


def test_a_dtype_is_torchs_or_its_name() -> None:
    assert {dtype_of(one) for one in (torch.bfloat16, "bfloat16", "torch.bfloat16")} == {torch.bfloat16}
    assert Recipe.of(tokens=1, dtype=torch.bfloat16).dtype == "bfloat16"
    assert Recipe.of(tokens=1, device=torch.device("cpu")).device == "cpu"
    for wrong, code in (("nn", "unknown"), ("float33", "unknown"), (3, "type")):
        with refused(code=code, field="dtype"):  # type: ignore[arg-type]
            dtype_of(wrong)  # type: ignore[arg-type]


def test_progress_is_a_function_of_events(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))  # a text that is prepared already is not read
    heard: list[Event] = []
    run = gf.train(NAME, text, SHORT, tokenizer="char", progress=heard.append)
    steps = [event for event in heard if isinstance(event, Step)]
    assert any(isinstance(event, ReadingEvent) for event in heard) and any(isinstance(event, Begin) for event in heard)
    assert {event.step for event in steps} == set(range(1, run.steps + 1))
    assert [event.validation["loss"] for event in steps if event.validation][-1] == run.validation["loss"]  # type: ignore[index]
    gf.train(NAME, text, SHORT, tokenizer="char", progress=False)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


def test_python_and_the_command_line_leave_the_same_folder(text: Path, tmp_path: Path) -> None:
    gf.train(NAME, text, SHORT, watch=2, out=tmp_path / "python", tokenizer="char")
    words = ["--tokens", "256", "--batch-size", "4", "--context", "16", "--threads", "1", "--dtype", "float32"]
    words += ["--tokenizer", "char", "--watch-every", "2", "--out", str(tmp_path / "typed")]
    assert main(["train", NAME, "--data", str(text), *words]) == 0
    python, typed = (
        {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "python", tmp_path / "typed")
    )
    assert typed - python == {"command.txt"} and python <= typed and "report.html" in python
    same = ("config.yaml", "recipe.yaml", "tokenizer/tokenizer.json")
    for name in (name for name in same if name in python):
        assert (tmp_path / "python" / name).read_bytes() == (tmp_path / "typed" / name).read_bytes(), name


@pytest.mark.parametrize("name", [NAME, NAME.replace("llama", "bloom"), "mamba@0.1m+layers=1+d_model=32"])
def test_samples_while_training_leave_weights_and_losses_as_they_are(name: str, text: Path) -> None:
    heard: list[Any] = []
    shown = gf.train(name, text, SHORT, tokenizer="char", progress=heard.append, evaluate_every=2)
    quiet = gf.train(name, text, SHORT, tokenizer="char", progress=False, evaluate_every=2)
    wrote = [event for event in heard if isinstance(event, Wrote)]
    evaluated = [row["step"] for row in shown.metrics if "validation" in row]
    assert [event.step for event in wrote] == evaluated and all(event.text and event.prompt for event in wrote)
    untimed = [[{k: v for k, v in row.items() if "second" not in k} for row in run.metrics] for run in (shown, quiet)]
    assert untimed[0] == untimed[1]
    pairs = zip(shown.model.parameters(), quiet.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def written(run: Path) -> list[int]:
    """Returns the steps of the texts in the report of a run."""
    page = (run / "report.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="results">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return [one["step"] for one in json.loads(found[1])["runs"][0]["written"]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_its_report_and_the_command_that_resumes_it(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    typed = ["train", NAME, "--data", str(text), "--steps", "8", "--batch-size", "4", "--context", "16",
             "--threads", "1", "--evaluate-every", "2", "--out", str(tmp_path / "a run")]  # fmt: skip
    step = Course.evaluated
    monkeypatch.setattr(Course, "evaluated", lambda self, run: (step(self, run), os.kill(os.getpid(), number)))
    monkeypatch.setattr("sys.argv", ["glassformer", *typed])
    assert main(typed) == 128 + number  # also before the first step
    monkeypatch.setattr(Course, "evaluated", step)
    said, told = capsys.readouterr()
    assert told.index("stopping") < told.index("saving step 3") < told.index("--resume")
    again = next(line.removeprefix("next: ") for line in said.splitlines() if line.startswith("next: "))
    page = (tmp_path / "a run" / "report.html").read_text(encoding="utf-8")
    assert "stopped at step 3" in page and "--resume" in page and written(tmp_path / "a run") == [2]
    assert main(shlex.split(again)[1:]) == 0
    assert written(tmp_path / "a run") == [2, 4, 6, 8]  # those before the stop too
    assert "the trained model" in (tmp_path / "a run" / "report.html").read_text(encoding="utf-8")


def test_budget_of_minutes_chooses_missing_settings_once(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run keeps it when it is resumed, however fast the machine is by then; a comparison when it is extended."""
    speeds = iter([16.0 * 4 * 2e6, 1.0])  # 4,000,000 steps of 4 x 16 in a minute, then hardly one
    monkeypatch.setattr(pace, "paces", lambda *given, **options: {"a": pace.StepPace((1.0,), next(speeds))})
    given = {"minutes": 0.001, "context": 16, "threads": 1, "dtype": "float32", "progress": False}
    for name in ("run", "again"):
        run = gf.train(NAME, text, **given, tokenizer="char", out=tmp_path / "run", resume=name == "again")
        assert (run.recipe.batch_size, run.recipe.evaluation_tokens) == (16, 16384)
    asked = gf.train(NAME, text, **given, tokenizer="char", batch_size=3, evaluation_tokens=48)
    assert (asked.recipe.batch_size, asked.recipe.evaluation_tokens) == (3, 48)
    for seeds in (1, 2):
        found = gf.compare([NAME], text, **given, tokenizer="char", seeds=seeds, out=tmp_path / "compared")
        chosen = [(run.recipe["batch_size"], run.recipe["evaluation_tokens"]) for run in found.results.runs]
        assert chosen == [(4, 64)] * seeds and {run.status for run in found.results.runs} == {"ok"}


def test_commands_after_a_run_work_as_they_are_printed(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = gf.train(NAME, text, SHORT, tokenizer="char", out="a run", progress=False)
    commands = [line.removeprefix("next: ") for line in str(run).splitlines() if line.startswith("next: ")]
    assert [command.split()[1] for command in commands] == ["generate", "inspect"]  # chars have no chat template
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, command
    apart = gf.train("transformer@0.1m", "pairs:reversal", {**SHORT, "tokens": 256}, objective="seq2seq", out="apart")
    commands = [line.removeprefix("next: ") for line in str(apart).splitlines() if line.startswith("next: ")]
    for command in commands:
        assert "--source" in command and main(shlex.split(command)[1:]) == 0, command
    assert "report: a run/report.html" in str(run) and "Samples" in Path("a run/report.html").read_text()
    lost = replace(run, status="diverged", error="it climbed", validation=None)
    assert "next: glassformer why 'a run'" in str(lost) and "expect" not in str(lost)


@pytest.mark.parametrize(
    ("nats", "words"), [(4.0, "hardly a word"), (1.88, "about half of them real"), (1.4697, "make little sense")]
)
def test_text_to_expect_at_a_loss(nats: float, words: str, text: Path) -> None:
    """Losses of characters of Shakespeare and the samples there: README of nanoGPT."""
    run = gf.train(NAME, text, SHORT, tokenizer="char", progress=False)
    measured = {**(run.validation or {}), "bits_per_byte": nats / math.log(2)}
    told = str(replace(run, validation=measured, sample=Sample(prompt="a", text="b")))
    assert words in told and "tokens per parameter" in told
    assert "expect" not in str(replace(run, sample=None))


def test_a_run_is_a_table_and_a_page(text: Path) -> None:
    run = gf.train(NAME, text, SHORT, tokenizer="char")
    frame = run.to_pandas()
    assert list(frame["loss"].dropna()) == [row["loss"] for row in run.metrics if "loss" in row]
    assert frame["validation.loss"].dropna().iloc[-1] == run.validation["loss"]  # type: ignore[index]
    assert run.to_dict()["validation"] == run.validation and f"{run.validation['loss']:.4f}" in run._repr_html_()  # type: ignore[index]


def test_a_service_needs_a_run_folder(text: Path) -> None:
    with refused(code="missing", field="out"):
        gf.train(NAME, text, SHORT, log_to=["tensorboard"])
