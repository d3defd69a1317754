"""Comparisons of the studio: a separate process, seen by a second studio, stopped and continued; nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from glassformer.files import being_written, only_writer
from glassformer.studio.bodies import TrainRequest
from glassformer.studio.runs import Runs
from glassformer.training.progress import read_metrics
from tests.refused import refused

MODELS = ["gpt2@0.05m", "gpt2@0.05m+rope"]


def asked(**given: Any) -> TrainRequest:
    return TrainRequest(**{"models": MODELS, "data": "number-words", "tokens": 20_000, "allow_unmatched": True} | given)


def until(check: Any, seconds: float = 240) -> Any:
    end = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < end, "too slow"
        time.sleep(0.2)
    return found


@pytest.mark.parametrize(
    ("given", "code", "field"),
    [
        ({"models": ["/etc/passwd", "gpt2@1m"]}, "unsupported", "model"),
        ({"models": ["hf:a/b", "gpt2@1m"]}, "unsupported", "model"),
        ({"data": "/etc/passwd"}, "unsupported", "data"),
        ({"tokens": None}, "conflict", "budget"),
    ],
)
def test_no_comparison_reads_a_file_that_a_request_names(tmp_path: Path, given: Any, code: Any, field: str) -> None:
    with refused(code=code, field=field):
        Runs(tmp_path).start(asked(**given))
    assert list(tmp_path.iterdir()) == []


def test_lock_of_another_process_is_seen(tmp_path: Path) -> None:
    assert not being_written(tmp_path)
    with only_writer(tmp_path):
        assert being_written(tmp_path)
    assert not being_written(tmp_path) and not being_written(tmp_path / "nothing")


@pytest.mark.slow
def test_comparison_outlives_its_server_and_is_stopped_and_continued_by_another(tmp_path: Path) -> None:
    name = Runs(tmp_path).start(asked(tokens=3_000_000))["name"]
    second = Runs(tmp_path)  # a studio that did not start it
    until(lambda: being_written(tmp_path / name) and "<path" in second.view(name)["figure"])
    assert second.view(name)["state"] == "running" and second.view(name)["verdicts"] == []
    pid = int((tmp_path / name / "process.txt").read_text())
    assert os.getsid(pid) == pid != os.getsid(0)
    with refused(code="conflict", field="name"):
        second.start(asked())
    second.comparisons.stop_named(name)
    until(lambda: not being_written(tmp_path / name))
    until(lambda: second.view(name)["state"] != "running")
    second.comparisons.resume(name)
    until(lambda: being_written(tmp_path / name))
    second.comparisons.stop_named(name)
    until(lambda: not being_written(tmp_path / name))


@pytest.mark.slow
def test_verdicts_and_report_come_at_the_end(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    name = runs.start(asked())["name"]

    async def watched() -> list[dict[str, Any]]:
        events = [event.decode() async for event in runs.events(name, None)]
        return [json.loads(event.partition("data: ")[2]) for event in events if event.startswith("id: ")]

    views = asyncio.run(asyncio.wait_for(watched(), 240))
    assert all(view["verdicts"] == [] for view in views if view["state"] == "running")
    last = views[-1]
    assert last["state"] == "complete" and last["runs_ended"] == 2 and last["report"] and last["verdicts"]
    assert all(model in last["legend"].replace("<wbr>", "") for model in MODELS) and "<path" in last["figure"]
    report = runs.page(name)
    assert report is not None and report.startswith("<!doctype html>")
    assert runs.listed()["runs"][0]["state"] == "complete"


@pytest.mark.slow
def test_stop_during_a_save_loses_nothing(tmp_path: Path) -> None:
    """Every step is saved, so that a signal meets a save; the run then continues from its last step, and ends."""
    runs = Runs(tmp_path)
    models = [f"{model}+recipe.checkpoint_seconds=0.001" for model in MODELS]
    name = runs.start(asked(models=models, tokens=400_000))["name"]
    steps: list[int] = []
    for _ in range(3):
        until(lambda: "step" in runs.view(name)["runs"][0]["progress"] if runs.view(name)["runs"] else False)
        for _ in range(5):  # clicks again and again
            runs.comparisons.stop_named(name)
        until(lambda: not being_written(tmp_path / name))
        until(lambda: runs.view(name)["state"] != "running")
        saved = [int(file.read_text().strip()[5:]) for file in sorted((tmp_path / name).glob("runs/*/run/latest"))]
        steps.append(sum(saved))
        assert runs.view(name)["state"] == "incomplete" and runs.view(name)["runs"]
        runs.comparisons.resume(name)
        until(lambda: being_written(tmp_path / name))
    assert steps == sorted(steps)
    until(lambda: runs.view(name)["state"] == "complete", 500)
    assert runs.view(name)["runs_ended"] == 2 and len(runs.weights()) == 2
    for run in tmp_path.glob(f"{name}/runs/*/run"):
        found = [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
        assert found == list(range(1, len(found) + 1))  # every step once


@pytest.mark.slow
def test_folder_deleted_under_a_training_ends_it_and_nothing_else(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    name = runs.start(asked(tokens=3_000_000))["name"]
    until(lambda: being_written(tmp_path / name) and "<path" in runs.view(name)["figure"])
    pid = int((tmp_path / name / "process.txt").read_text())
    shutil.rmtree(tmp_path / name)

    async def last() -> str:
        return [event.decode() async for event in runs.events(name, None)][-1]

    assert asyncio.run(asyncio.wait_for(last(), 60)).startswith("event: lost")
    process = runs.comparisons._process
    assert process is not None and process.pid == pid
    until(lambda: process.poll() is not None, 120)
    second = runs.start(asked())["name"]
    until(lambda: runs.view(second)["state"] == "complete")
