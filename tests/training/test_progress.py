"""Files of a run are checked before it resumes, and the message about a damaged one has the remedy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.naming import preset
from glassformer.text import TextData
from glassformer.training import Interrupted, Report, Reporter, Run, checkpoint, load_run, train
from glassformer.training.progress import read_metrics
from tests.refused import refused

RECIPE: dict[str, Any] = {
    "tokens": 8 * 2 * 16, "batch_size": 2, "context": 16, "compile": False, "threads": 1, "evaluation_tokens": 64,
    "checkpoint_seconds": 1e-9,
}  # fmt: skip
"""Eight steps, each saved."""
STOPPED = 5


def model() -> ModelConfig:
    return preset("llama@1m+layers=1+d_model=16+heads=1")


def stop(report: Report) -> None:
    if report.step == STOPPED and report.validation is None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def begun(text: TextData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped at step 5; step 4 is kept too."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.raises(Interrupted):
        train(model(), text, RECIPE, folder, callbacks=[Reporter(stop)])
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_00000004", "step_00000005"]
    return folder


@pytest.fixture(scope="module")
def straight(text: TextData) -> Run:
    return train(model(), text, RECIPE)


@pytest.fixture
def folder(begun: Path, tmp_path: Path) -> Path:
    return shutil.copytree(begun, tmp_path / "run")


def resume(folder: Path, text: TextData) -> Run:
    return train(model(), text, RECIPE, folder, resume=True)


def told(run: Run) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in run.metrics if "loss" in row]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("recent", None), ("recent", ["x"]), ("recent", [float("nan")]), ("seconds", None), ("seconds", "x"),
        ("seconds", "1.0"), ("seconds", float("nan")), ("seconds", float("inf")), ("seconds", -1e9),
        ("seconds", 10**400), ("best", "x"), ("best", True), ("first_loss", []), ("step", 10**12), ("step", 4),
        ("step", True), ("shift", 10**30), ("shift", 1), ("rolled_back", 11), ("left_out", -1), ("validation", 7),
        ("validation", {"loss": 1.0}), ("data", 3), ("sha256", {"model.safetensors": 3}),
    ],
    ids=lambda value: str(value)[:12],
)  # fmt: skip
def test_a_state_that_cannot_have_been_is_refused(folder: Path, text: TextData, field: str, value: Any) -> None:
    """By name, with the checkpoint that is whole."""
    path = folder / "checkpoints" / "step_00000005" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(RequestError) as caught:
        resume(folder, text)
    said = str(caught.value)
    assert "state.json" in said and "\n" not in said and len(said) < 700
    assert said.endswith(f"write step_00000004 into {folder / 'latest'}")
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_step_beyond_the_end_is_not_a_finished_run(folder: Path, text: TextData) -> None:
    checkpoints = folder / "checkpoints"
    (checkpoints / "step_00000005").rename(checkpoints / "step_00000009")
    (folder / "latest").write_text("step_00000009\n")
    path = checkpoints / "step_00000009" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": 9}))
    with refused(code="range", field="state.json:step"):
        resume(folder, text)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "watch.json", "state.json"])
def test_the_way_on_that_is_named_is_one(folder: Path, text: TextData, straight: Run, file: str) -> None:
    """The newest checkpoint is damaged: done as the sentence says, the run ends as if nothing had been."""
    newest = folder / "checkpoints" / "step_00000005"
    (newest / file).write_bytes((newest / file).read_bytes()[:-9])
    with pytest.raises(RequestError) as caught:
        resume(folder, text)
    assert str(newest / file) in str(caught.value)
    assert str(caught.value).count("step_00000004 is whole") == 1
    (folder / "latest").write_text("step_00000004")
    run = resume(folder, text)
    assert told(run) == told(straight) and run.validation == straight.validation
    assert checkpoint.latest(folder) == folder / "checkpoints" / "step_00000008"


def test_run_without_an_intact_checkpoint_is_refused(folder: Path, text: TextData) -> None:
    for path in folder.glob("checkpoints/*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    for act in (lambda: resume(folder, text), lambda: load_run(folder)):
        with refused(code="damaged", field="model.safetensors"):
            act()
    (folder / "latest").write_text("step_00000007")
    with refused(code="missing", field="latest"):
        checkpoint.latest(folder)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 3, "validation": 7}', '{"step": 3, "loss": 1.0}', '{"step": 3}', "3", "[]", "[" * 100_000, '{"st',
        '{"step": 3, "tokens": 96, "seconds": 1.0, "skipped": null}', '{"step": -1, "tokens": 0, "seconds": 0, '
        '"skipped": "nan"}', '{"step": 3, "tokens": 96, "seconds": NaN, "validation": {"loss": 1.0, "perplexity": 1.0, '
        '"bits_per_byte": 1.0, "tokens": 3}}', '{"step": 3, "tokens": 96, "seconds": "x", "loss": 1.0, '
        '"learning_rate": 1.0, "grad_norm": 1.0, "tokens_per_second": 1.0}',
    ],
    ids=lambda line: line[:40],
)  # fmt: skip
def test_invalid_rows_of_metrics_are_skipped(folder: Path, text: TextData, straight: Run, line: str) -> None:
    whole = read_metrics(folder / "metrics.jsonl")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert read_metrics(folder / "metrics.jsonl") == whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = resume(folder, text)
    assert told(run) == told(straight) and run.validation == straight.validation
    assert read_metrics(folder / "metrics.jsonl") == run.metrics


def test_lost_rows_of_metrics_warn(folder: Path, text: TextData, straight: Run) -> None:
    """The run is the same; a warning reports that its curve lacks the first steps."""
    (folder / "metrics.jsonl").unlink()
    with pytest.warns(UserWarning, match=r"metrics\.jsonl lacks 5 of the 5 steps so far") as told_of:
        run = resume(folder, text)
    assert len(told_of) == 1 and "\n" not in str(told_of[0].message)
    assert told(run) == told(straight)[STOPPED:] and run.validation == straight.validation


def test_row_without_bits_per_byte_is_read_back(tmp_path: Path) -> None:
    """A tokenizer that loses text still has a loss."""
    found = {"loss": 1.0, "perplexity": 2.7, "bits_per_byte": None, "tokens": 3}
    row = {"step": 3, "tokens": 96, "seconds": 1.0, "validation": found}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert read_metrics(tmp_path / "metrics.jsonl") == [row]
