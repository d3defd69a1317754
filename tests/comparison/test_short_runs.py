"""Short runs: how often they are evaluated and write, where their time goes, and what is left of a finished one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import glassformer as gf
from glassformer.cli import main
from glassformer.comparison import single
from glassformer.runs.events import Wrote

NAME = "llama@0.1m+layers=1+d_model=32+heads=2"
SHORT: dict[str, Any] = {"batch_size": 4, "context": 16, "threads": 1, "dtype": "float32", "progress": False}
TYPED = ["--steps", "4", "--batch-size", "4", "--context", "16", "--threads", "1", "--lr", "1e-3"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(f"line {n} of a small text about cats and trees" for n in range(400)))
    return path


@pytest.fixture(scope="module")
def begun(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, whose weights others start from."""
    out = tmp_path_factory.mktemp("run") / "begun"
    gf.train(NAME, text, steps=4, tokenizer="char", out=out, **SHORT)
    return out


def evaluated(run: gf.Run) -> list[int]:
    return [row["step"] for row in run.metrics if "validation" in row]


@pytest.mark.parametrize(("steps", "at"), [(1, [1]), (4, [2, 4]), (30, [10, 20, 30])])
def test_a_short_run_is_evaluated_a_few_times(steps: int, at: list[int], text: Path) -> None:
    run = gf.train(NAME, text, steps=steps, tokenizer="char", **SHORT)
    assert evaluated(run) == at and run.before is None


def test_a_run_from_weights_shows_the_loss_before_it(text: Path, begun: Path) -> None:
    run = gf.train(str(begun), text, steps=4, pretrained=True, **SHORT)
    assert evaluated(run) == [0, 2, 4] and run.validation is not None and run.before is not None
    assert run.to_dict()["before"]["loss"] == run.before["loss"] > run.validation["loss"]
    assert run.spent.keys() >= {"loading", "training", "evaluating", "sampling"}
    run.spent = {"loading": 200.0, "training": 40.0}
    assert any("4:00 in all: loading 3:20, training 0:40" in str(line) for line in run.lines())
    run.spent = {"loading": 50.0, "training": 100.0}
    assert not any("in all" in str(line) for line in run.lines())


def test_unused_weights_are_noted(text: Path, begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for typed, told in (([], True), (["--pretrained"], False)):
        assert main(["train", str(begun), "--data", str(text), *TYPED, "--dry", *typed]) == 0
        assert ("are not used" in capsys.readouterr().err) is told
    asked = single.SingleRun.of(str(begun), text, steps=1, context=16)
    assert asked.unused and not single.SingleRun.of(NAME, text, steps=1, context=16).unused


def test_samples_that_take_longer_than_training_are_left_out_but_for_the_last(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = single.write_sample
    monkeypatch.setattr(single, "BRIEF", 0.0)
    monkeypatch.setattr(single, "write_sample", lambda *given: (time.sleep(2.0), real(*given))[1])
    heard: list[Any] = []
    gf.train(NAME, text, steps=4, evaluate_every=1, tokenizer="char", **{**SHORT, "progress": heard.append})
    assert [event.step for event in heard if isinstance(event, Wrote)] == [1, 4]


@pytest.mark.parametrize("pretrained", [False, True])
def test_finished_run_is_printed_without_its_weights(
    pretrained: bool, text: Path, begun: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    names = [str(begun), "--pretrained"] if pretrained else [NAME]
    typed = ["train", *names, "--data", str(text), *TYPED, "--out", str(tmp_path / "run"), "--json"]
    assert main(typed) == 0
    first = json.loads(capsys.readouterr().out)
    with monkeypatch.context() as patched, pytest.warns(UserWarning) as warned:
        patched.setattr(single, "prepare_run", None)
        patched.setattr(single, "trained_arm", None)
        assert main([*typed, "--resume"]) == 0
    assert any(f"is finished: all {first['steps']} steps" in str(one.message) for one in warned)
    again = json.loads(capsys.readouterr().out)
    for key in ("status", "steps", "tokens", "seconds", "validation", "run", *(["before"] * pretrained)):
        assert again[key] == first[key], key
    assert main([*typed, "--resume", "--seed", "1"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == "seed"
