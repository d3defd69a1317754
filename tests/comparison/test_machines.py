"""Speeds and minutes are judged only on one machine; losses on any machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glassformer.comparison import compare
from glassformer.comparison.summary import busy
from glassformer.runs.results import COMPANY, MachineRecord, RunResult, unlike
from tests.comparison.test_compare import PLAN, TINY
from tests.comparison.test_looks import source
from tests.runs.stand_in import Instead, trained_at_once

__all__ = ["source"]
A, B, C = (f"{family}@1m{TINY}" for family in ("gpt2", "llama", "bloom"))
HERE = {"processor": "one", "device": "cpu", "dtype": "float32", "threads": 2, "torch": "2"}


def on(machine_of: Callable[[str, int], dict[str, Any]]) -> Instead:
    """Runs whose name and seed decide on which machine they were trained, and that are the faster the shorter it is."""

    def trained(place: Path, notify: Any) -> tuple[None, int]:
        trained_at_once(place, notify)
        result = json.loads((place / "result.json").read_text())
        result["machine"] = machine_of(result["name"], result["seed"])
        result["train"]["tokens_per_second"] = 1e6 / len(result["name"])
        result["validation"]["loss"] += 0.1 * result["seed"] * len(result["name"])
        (place / "result.json").write_text(json.dumps(result))
        return None, 0

    return Instead(trained)


CASES = {
    "one machine": (lambda name, seed: HERE, "minutes", None),
    "a machine unlike the others": (
        lambda name, seed: {**HERE, "processor": "two"} if (name, seed) == (B, 1) else HERE, "minutes",
        "unlike machines",
    ),
    "a device of two runs": (lambda name, seed: {**HERE, "shared": True}, "minutes", "shared a device"),
    "fewer cores": (lambda name, seed: {**HERE, "threads": 1 + seed}, "tokens", "unlike machines"),
}  # fmt: skip


@pytest.mark.parametrize(("cores", "shared", "noted"), [(1.4, False, True), (0.1, False, False), (1.4, True, False)])
def test_machine_that_was_not_quiet_is_noted(cores: float, shared: bool, noted: bool) -> None:
    """Runs side by side are each other's company, which another note reports."""
    record = MachineRecord({**HERE, COMPANY: cores, **({"shared": True} if shared else {})})
    quiet = RunResult(name="a", machine=MachineRecord(HERE))
    notes = busy([quiet, RunResult(name="b", seed=3, machine=record)])
    assert bool(notes) == noted
    assert not noted or ("1.4 cores" in notes[0] and "1 of 2 runs" in notes[0] and "b seed 3" in notes[0])


@pytest.mark.parametrize("case", CASES)
def test_verdicts_by_time_require_equal_machines(case: str, source: Path, tmp_path: Path) -> None:
    machine_of, budget, why = CASES[case]
    plan = {**PLAN, "seeds": 2, "threads": None, "tokens": None, budget: 500}
    found = compare([A, B, C], source, out=tmp_path / "out", executor=on(machine_of), **plan).results
    report = (tmp_path / "out" / "report.html").read_text()
    assert bool(found.verdicts) == (budget == "tokens" or why is None)
    notes = [note for note in found.budget.notes if "speeds do not compare" in note]
    assert bool(notes) == (why is not None) and all(str(why) in note for note in notes)
    assert all(("gives no verdict" in note) == (budget == "minutes") for note in notes)
    assert ("so their speeds do not compare" in report) == (why is not None)
    assert ("against training speed. " in report) == (why is None)
    assert found.machine.processor == "one"


def test_machine_settings_of_recipes_may_differ() -> None:
    """If recipes give arms different threads, dtypes or devices, their difference is intended; a recipe cannot choose
    processor or card."""

    def run(recipe: dict[str, Any], **machine: Any) -> RunResult:
        return RunResult(name="a", recipe=recipe, machine=MachineRecord({**HERE, **machine}))

    for field, value in (("threads", 4), ("dtype", "bfloat16"), ("device", "cuda")):
        assert unlike([run({}), run({}, **{field: value})]) is not None
        assert unlike([run({field: "auto"}), run({field: value}, **{field: value})]) is None
    for field in ("processor", "accelerator", "torch"):
        assert unlike([run({}, **{field: "a"}), run({field: "b"}, **{field: "b"})]) is not None
    assert unlike([run({}), run({}).changed(machine=MachineRecord({}))]) is None  # an older file says nothing
    assert unlike([run({}), run({}, processor="two").changed(status="failed")]) is None
