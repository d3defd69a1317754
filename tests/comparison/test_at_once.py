"""The number of runs that are trained at once, if no option gives it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import glassformer as gf
from glassformer import machine
from glassformer.comparison import arms, experiment
from glassformer.comparison.arms import SMALL, at_once
from glassformer.comparison.summary import PACED
from glassformer.naming import preset
from glassformer.runs import executor
from glassformer.runs.executor import Local, with_workers
from glassformer.runs.files import read_results
from glassformer.runs.results import unlike
from glassformer.training import Recipe
from tests.comparison.test_compare import PLAN, TINY
from tests.refused import refused
from tests.runs.stand_in import Instead, trained_at_once

A, B = (f"{family}@1m{TINY}" for family in ("gpt2", "llama"))
ROOMY = 1 << 40
FREE = {**PLAN, "threads": None, "compile": False, "device": "cpu", "seeds": 2}
"""Plan of two arms without a number of threads"""


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the number of cores; there are two, and much memory."""

    def played(number: int) -> None:
        for module in (machine, arms, executor):
            monkeypatch.setattr(module, "available_cores", lambda: number)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "all_memory", lambda: ROOMY)
    played(2)
    return played


def chosen(expression: str = "llama@1m", runs: int = 12, cores: int = 2, **other: Any) -> tuple[int, int | None]:
    recipe = {"tokens": 1000, "batch_size": 8, "context": 128, **other.pop("recipe", {})}
    how = machine.Settings(other.pop("device", "cpu"), "float32", cores, False, "", other.pop("fixed", False))
    models = {"a": (preset("llama@0.1m+vocab_size=100"), Recipe.of(**recipe))}
    models["b"] = preset(f"{expression}+vocab_size=100"), Recipe.of(**recipe)
    return at_once(models, runs, how, cores, other.pop("memory", ROOMY), **other)


def test_small_runs_share_the_cores() -> None:
    config = preset("llama@1m+vocab_size=100")
    assert 3 * config.flops(128) * 8 * 128 <= SMALL < 3 * config.flops(128) * 16 * 128
    assert chosen() == (2, 1) and chosen(cores=8) == (8, 1) and chosen(cores=8, runs=3) == (3, 2)
    assert chosen(cores=1) == chosen(runs=1) == (1, None)
    assert chosen(cores=8, memory=None) == (8, 1) and chosen(cores=8, memory=7 << 30) == (3, 2)
    assert chosen(memory=3 << 30) == (1, None)


@pytest.mark.parametrize(
    "other",
    [
        {"expression": "llama@3m"}, {"recipe": {"batch_size": 16}}, {"device": "cuda"}, {"fixed": True},
        {"recipe": {"tokens": None, "minutes": 1.0}}, {"recipe": {"threads": 2}},
    ],
)  # fmt: skip
def test_others_are_trained_one_after_the_other(other: dict[str, Any]) -> None:
    assert chosen(**other) == (1, None)


def test_earlier_runs_decide_the_threads() -> None:
    """The number of cores and the size of a step do not matter."""
    assert chosen(cores=8, before=(None, False)) == (1, None) and chosen(cores=8, before=(1, False)) == (1, 1)
    assert chosen(cores=8, before=(2, True)) == (4, 2) and chosen(cores=1, before=(2, True)) == (1, 2)
    assert chosen("llama@3m", before=(1, True)) == (2, 1) and chosen(before=(1, True), device="cuda") == (1, 1)
    assert chosen(before=(1, True), fixed=True) == (2, 1)


def marked(place: Path, notify: Any) -> tuple[None, int]:
    """A made-up run whose machine says whether it was shared, as a real one's does."""
    trained_at_once(place, notify)
    result = json.loads((place / "result.json").read_text())
    result["machine"] = {"device": "cpu", "shared": json.loads((place / "request.json").read_text())["shared"]}
    (place / "result.json").write_text(json.dumps(result))
    return None, 0


def threads_in(folder: Path) -> list[int | None]:
    return [run.recipe["threads"] for run in read_results(folder).runs]  # type: ignore[union-attr]


@pytest.mark.parametrize(("first", "threads"), [(None, 1), (1, None), (2, 1)])
def test_later_runs_have_the_threads_of_the_first(
    first: int | None, threads: int | None, source: Path, tmp_path: Path, cores: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Seeds are added on more cores and on one, and finished runs are kept."""
    monkeypatch.setattr(experiment, "paces", lambda models, text, **_: {})
    given = auto() if first is None else with_workers(auto(), first)
    gf.compare([A, B], source, out=tmp_path, executor=given, **FREE)
    assert threads_in(tmp_path) == [threads] * 4
    for number, seeds in ((8, 3), (1, 4)):
        cores(number)
        events: list[Any] = []
        plan = {**FREE, "seeds": seeds, "progress": events.append}
        gf.compare([A, B], source, out=tmp_path, executor=auto(), **plan)
        assert threads_in(tmp_path) == [threads] * 2 * seeds
        assert sum(event.event == "start" for event in events) == 2
    with refused(code="changed", field="threads"):
        gf.compare([A, B], source, out=tmp_path, executor=given, **{**FREE, "threads": 3})


def auto() -> Local:
    found = Instead(marked)
    found.workers = None
    return found


@pytest.mark.parametrize(
    "plan",
    [{"threads": 1}, {"seeds": 1, "models": [A]}, {"tokens": None, "minutes": 0.1, "evaluation_tokens": 512}],
)
def test_a_comparison_that_has_one_run_at_once(plan: dict[str, Any], source: Path, tmp_path: Path) -> None:
    plan = {"models": [A, B], **FREE, **plan}
    found = gf.compare(plan.pop("models"), source, out=tmp_path, executor=auto(), **plan)
    assert threads_in(tmp_path) == [plan["threads"]] * len(found.runs)
    assert not any(run.machine.shared for run in found.runs) and not found.results.speeds


def test_runs_at_once_have_the_bits_of_a_given_number(source: Path, tmp_path: Path) -> None:
    """By real processes; their speeds are measured in turn after them, once."""
    told: list[Any] = []
    options: dict[str, Any] = {**FREE, "seeds": 1}
    found = gf.compare([A, B], source, out=tmp_path / "a", executor=Local(None), progress=told.append, **options)
    given = gf.compare([A, B], source, out=tmp_path / "b", executor=Local(2), **options)
    assert [run.validation for run in found.runs] == [run.validation for run in given.runs]
    assert [run.recipe for run in found.runs] == [run.recipe for run in given.runs]
    assert found.runs[0].recipe["threads"] == 1 and all(run.machine.shared for run in found.runs)
    assert next(event for event in told if event.event == "begin").how.startswith("2 runs at once, each on cpu")
    speeds = found.results.speeds
    assert speeds.keys() == {A, B} and PACED in found.results.budget.notes
    assert unlike(found.runs) is not None and unlike(found.results.paced) is None
    assert {row["name"]: row["tokens_per_second"] for row in found.records()} == speeds
    assert "so their speeds do not compare" not in (tmp_path / "a" / "report.html").read_text()
    again = gf.compare([A, B], source, out=tmp_path / "a", executor=Local(None), **options)
    assert again.results.speeds == speeds and again.runs == found.runs
