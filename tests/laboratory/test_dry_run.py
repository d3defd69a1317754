"""A dry run says what the run would be: its steps, tokens, rates and files are those of the run that follows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import glassformer as gf
from glassformer.cli import main
from glassformer.figures.terminal import sparkline
from tests.refused import refused

STORY = "the cat sat on the mat and the dog sat on the cat.\n" * 60
PLAN = {"batch_size": 2, "context": 16, "tokenizer": "byte", "schedule": {"kind": "cosine", "warmup": 3}}


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "story.txt").write_text(STORY, encoding="utf-8")
    return str(tmp_path / "story.txt")


@pytest.mark.parametrize("more", [{}, {"watch": 2}], ids=["plain", "watched"])
def test_the_plan_is_the_run(more: dict[str, int], story: str, tmp_path: Path):
    out = tmp_path / "run"
    asked = {**PLAN, **more, "steps": 12, "out": out}
    found = gf.dry_run("llama@0.1m", story, **asked)
    assert not out.exists()
    run = gf.train("llama@0.1m", story, progress=False, **asked)
    assert (found.steps, found.tokens, found.parameters) == (run.steps, run.tokens, run.config.num_params())
    assert set(found.files) == {path.name for path in out.iterdir() if path.name != ".lock"}
    rates = [row["learning_rate"] for row in run.metrics if "loss" in row]
    assert found.schedule[0][1] == pytest.approx(rates[0]) and found.schedule[-1][1] == pytest.approx(rates[-1])
    assert found.learning_rate == run.learning_rate and found.memory is not None and found.memory > 1e6
    page = (out / "report.html").read_text(encoding="utf-8")
    assert 'id="rates"' in page and "Learning rate against tokens" in page and f"{max(rates):.3g}" in page


def test_rates_follow_the_formula_of_the_schedule(story: str):
    """Loshchilov & Hutter 2016, to a floor of a tenth."""
    found = gf.dry_run("llama@0.1m", story, **{**PLAN, "schedule": {"kind": "cosine", "warmup": 0}}, steps=64)
    for at, (share, rate) in enumerate(found.schedule):
        u = at / 64
        expected = found.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * u)))
        assert share == at / 63 and rate == pytest.approx(expected)


def test_budgets(story: str, tmp_path: Path):
    epochs = gf.dry_run("llama@0.1m", story, **PLAN, epochs=2.0)
    assert epochs.passes == pytest.approx(2, abs=0.05) and epochs.steps is not None
    minutes = gf.dry_run("llama@0.1m", story, **PLAN, minutes=1.0)
    assert minutes.steps is minutes.tokens is minutes.warmup is None and minutes.minutes == 1 and minutes.schedule
    assert minutes.files == () and "1:00" in str(minutes)


def test_command_trains_nothing(story: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    words = ["train", "llama@0.1m", "--data", story, "--tokenizer", "byte", "--steps", "10", "--out", str(out), "--dry"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert not out.exists() and "10 steps of 16 x 256 tokens" in shown and "█" in shown and "recipe.yaml" in shown
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 10 and len(told["schedule"]) == 64 and {"checkpoints", "command.txt"} <= set(told["files"])


def test_command_needs_neither_folder_nor_length(story: str, capsys: pytest.CaptureFixture[str]):
    """A pass over 2,754 characters, those held out left aside, in steps of 4 x 16."""
    words = ["train", "llama@0.1m", "--data", story, "--tokenizer", "byte", "--batch-size", "4", "--context", "16"]
    assert main([*words, "--dry", "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert "one pass" in told.err and found["passes"] == pytest.approx(1, abs=0.05) and not found["files"]
    assert found["steps"] == pytest.approx(found["train_tokens"] / 64, abs=1)
    assert main(words) == 2 and "--out and a length" in capsys.readouterr().err
    assert main([*words, "--steps", "3"]) == 2 and "needs --out;" in capsys.readouterr().err


def test_dry_run_refuses_requests_that_train_refuses(story: str):
    with refused(code="conflict", field="budget"):
        gf.dry_run("llama@0.1m", story)
    with refused(code="unknown", field="name"):
        gf.dry_run("lama@0.1m", story, steps=1)


@pytest.mark.parametrize(
    ("values", "bars"), [([], ""), ([0, 0], "▁▁"), ([0, 1, 2, 4], "▁▃▅█"), ([-1, 7], "▁█"), ([3], "█")]
)
def test_sparkline(values: list[float], bars: str):
    assert sparkline(values) == bars
