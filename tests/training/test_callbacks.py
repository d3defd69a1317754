"""Callbacks may observe a run and act on it, and their state is part of the checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from glassformer.dynamics.watch import Moment
from glassformer.text import TextData
from glassformer.training import Callback, Interrupted, Report, Reporter, checkpoint, train
from glassformer.training.state import Training
from tests.training.test_loop import TEN, interrupt_at, model, told


class Warmer(Callback):
    """Scales gradients by a number that grows: the next step depends on it."""

    def __init__(self) -> None:
        self.scale = 0.1

    def before_update(self, run: Training, moment: Moment) -> None:
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= self.scale
        self.scale += 0.1

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def restore(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


def test_state_of_callbacks_resumes_bit_for_bit(text: TextData, tmp_path: Path) -> None:
    recipe = {**TEN, "clip": None, "optimizer": "sgd"}
    train(model(), text, recipe, tmp_path / "straight", callbacks=[Warmer(), Warmer()])
    with pytest.raises(Interrupted):
        train(model(), text, recipe, tmp_path / "broken", callbacks=[Warmer(), Warmer(), interrupt_at(5)])
    found = checkpoint.latest(tmp_path / "broken")
    assert found is not None
    kept = json.loads((found / "state.json").read_text())["callbacks"]
    assert list(kept) == ["Warmer.0", "Warmer.1"] and kept["Warmer.0"]["scale"] == pytest.approx(0.6)
    train(model(), text, recipe, tmp_path / "broken", resume=True, callbacks=[Warmer(), Warmer()])
    assert told(tmp_path / "broken") == told(tmp_path / "straight")
    plain = train(model(), text, recipe)
    assert told(tmp_path / "straight") != [row["loss"] for row in plain.metrics if "loss" in row]


class Counting(Callback):
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.order: list[str] = []

    def called(self, hook: str) -> None:
        self.calls[hook] += 1
        self.order.append(hook)

    def started(self, run: Training) -> None:
        self.called("started")

    @contextmanager
    def around_backward(self, run: Training) -> Iterator[None]:
        yield
        self.called("backward")

    def before_update(self, run: Training, moment: Moment) -> None:
        assert all(parameter.grad is not None for parameter in run.model.parameters())
        self.called("before_update")
        if moment.step == 4:
            run.skip()

    def after_update(self, run: Training, moment: Moment) -> None:
        self.called("after_update")

    def skipped(self, run: Training, moment: Moment) -> None:
        self.called("skipped")

    def recorded(self, run: Training, row: dict[str, Any]) -> None:
        assert run.folder is not None
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == run.rows and run.rows[-1] == row  # written before the call
        self.called("recorded")

    def evaluated(self, run: Training) -> None:
        self.called("evaluated")

    def saved(self, run: Training, folder: Path) -> None:
        assert checkpoint.latest(folder.parents[1]) == folder
        self.called("saved")

    def ended(self, run: Training) -> None:
        self.called("ended")


def test_hooks_are_called_in_their_order(text: TextData, tmp_path: Path) -> None:
    seen = Counting()
    run = train(model(), text, {**TEN, "evaluate_every": 5}, tmp_path / "run", callbacks=[seen])
    assert run.steps == 10
    assert seen.calls == {
        "started": 1, "backward": 10, "before_update": 10, "after_update": 9, "skipped": 1, "recorded": 12,
        "evaluated": 2, "saved": 1, "ended": 1,
    }  # fmt: skip
    assert seen.order[:5] == ["started", "backward", "before_update", "after_update", "recorded"]
    assert seen.order[-4:] == ["recorded", "evaluated", "saved", "ended"]
    row = run.metrics[3]
    assert row["step"] == 4 and "loss" not in row and row["skipped"] > 0


class Stop(Callback):
    def after_update(self, run: Training, moment: Moment) -> None:
        if moment.step == 3:
            run.stop("enough")


def test_a_callback_ends_a_run(text: TextData, tmp_path: Path) -> None:
    reports: list[Report] = []
    run = train(model(), text, TEN, tmp_path / "run", callbacks=[Stop(), Reporter(reports.append)])
    assert (run.status, run.error, run.steps) == ("diverged", "enough", 3)
    assert [report.step for report in reports if report.validation is None] == [1, 2, 3]
    assert checkpoint.latest(tmp_path / "run") is None
