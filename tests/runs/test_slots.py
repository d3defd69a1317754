"""Several runs at once on one machine, each on its device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from glassformer import machine
from glassformer.comparison.arms import threads_of
from glassformer.runs import executor, workers
from glassformer.runs.arm import BEGUN
from glassformer.runs.executor import Slots
from glassformer.runs.request import RunRequest
from tests.refused import refused

MEETS = """
import json, os, sys, time
from pathlib import Path
here = Path(json.loads(sys.stdin.readline()))
print("STARTED", flush=True)
(here / "there").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
while len(list(here.parent.glob("*/there"))) < 2:
    time.sleep(0.01)
raise ValueError('met')
""".replace("STARTED", BEGUN)


def test_each_run_sees_its_own_device(asked: list[RunRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two wait for each other; the third takes the slot that is free. Cards are counted among those that
    this process sees."""
    monkeypatch.setattr(machine, "device_named", lambda name: name)
    monkeypatch.setattr(executor, "available_cores", lambda: 8)
    monkeypatch.setattr(workers, "START", MEETS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    slots = Slots(["cuda:0", "cuda:1"])
    assert (slots.workers, slots.shared) == (2, False) and threads_of(slots, None, "minutes") is not None
    three = [*asked, replace(asked[0], recipe=asked[0].recipe.replace(seed=9))]
    results = list(slots.run(three, tmp_path))
    assert [one.error for one in results] == ["ValueError: met"] * 3
    seen = [(one.place(tmp_path) / "there").read_text() for one in three]
    assert sorted(seen[:2]) == ["4", "7"] and seen[2] in seen[:2] and sorted(slots.free) == ["cuda:0", "cuda:1"]
    assert not any(json.loads((one.place(tmp_path) / "request.json").read_text())["shared"] for one in three)


def test_a_device_of_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither their speeds nor their minutes are those of the device."""
    monkeypatch.setattr(executor, "available_cores", lambda: 8)
    slots = Slots(["cpu", "cpu"])
    assert slots.shared
    with refused(code="conflict", field="workers"):
        threads_of(slots, None, "minutes")
