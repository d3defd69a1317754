"""Looks, pilots and terms of whole comparisons, whose runs are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import glassformer as gf
from glassformer.cli import main
from glassformer.comparison.terms import rate_words
from glassformer.errors import RequestError
from glassformer.runs.executor import Local
from glassformer.runs.looks import constant_level, look_notes
from tests.comparison.test_compare import PLAN, TINY
from tests.refused import refused
from tests.runs.stand_in import Instead, Stand, content, trained_at_once

compare = content(gf.compare)

A, B, C = (f"{family}@1m{TINY}" for family in ("gpt2", "llama", "bloom"))


def noisy(place: Path, notify: Any) -> tuple[None, int]:
    """Writes a result with a loss of 2 plus noise of .01 that depends on name and seed, after a minute of training."""
    trained_at_once(place, notify)
    result = json.loads((place / "result.json").read_text())
    noise = sum(map(ord, result["name"])) * (result["seed"] + 3) ** 3 % 101 / 101 - 0.5
    result["validation"]["loss"] = 2 + 0.03 * noise
    result["train"]["seconds"] = 60.0
    (place / "result.json").write_text(json.dumps(result))
    return None, 0


NOISY = Instead(noisy)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"line {n} of a small text about cats and trees" for n in range(400)))
    return path


@pytest.fixture
def trained(source: Path, tmp_path: Path) -> Any:
    """compare() in one folder."""

    def compared(names: list[str], **fields: Any) -> dict[str, Any]:
        return compare(names, source, out=tmp_path / "out", executor=NOISY, **{**PLAN, **fields})

    return compared


def test_looks_are_counted_and_correct_the_intervals(trained: Any, tmp_path: Path) -> None:
    first = trained([A, B], seeds=4)
    assert first["looks"] == [4] and first["verdicts"][0]["level"] == pytest.approx(0.05)
    assert trained([A, B], seeds=4)["looks"] == [4]  # repeating a call does not count as another look
    second = trained([A, B], seeds=8)
    assert second["looks"] == [4, 8] and second["verdicts"][0]["level"] == pytest.approx(constant_level([4, 8]))
    (note,) = [note for note in second["budget"]["notes"] if "Seeds were added" in note]
    assert "looks after 4 and 8 seeds the level is 2.7" in note and "--looks 4,8 from the start keeps 5 %" in note
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Seeds were added after a verdict had been seen" in page
    with refused(code="conflict", field="looks"):
        trained([A, B], seeds=8, looks=[4, 8])


def test_planned_looks_have_their_level_from_the_first(trained: Any) -> None:
    level = pytest.approx(constant_level([4, 8]))
    first = trained([A, B], seeds=4, looks=[8, 4])
    assert (first["looks"], first["planned_looks"]) == ([4], [4, 8]) and first["verdicts"][0]["level"] == level
    second = trained([A, B], seeds=8)  # the plan is remembered
    assert second["verdicts"][0]["level"] == level
    assert any("as planned: each has the level 2.7" in note for note in second["budget"]["notes"])


def test_verdicts_are_given_when_all_runs_have_ended(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    def watched(place: Path, notify: Any) -> tuple[None, int]:
        held = json.loads((tmp_path / "out" / "results.json").read_text())
        page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
        seen.append((len(held["verdicts"]), "given once all runs have ended" in page))
        assert held["looks"] == []
        return noisy(place, notify)

    results = compare([A, B], source, seeds=3, out=tmp_path / "out", executor=Instead(watched), **PLAN)
    assert seen == [(0, True)] * 6 and len(results["verdicts"]) == 1


def test_pilot_estimates_power_on_separate_seeds(trained: Any, tmp_path: Path) -> None:
    results = trained([A, B, C], power=0.01)
    power = results["power"]
    assert (power["pilot"], len(power["pairs"]), results["verdicts"], results["looks"]) == (3, 2, [], [])
    assert {run["seed"] for run in results["runs"]} == {1000, 1001, 1002}
    assert power["difference"] == pytest.approx(0.01 * 2, rel=0.02) and power["seeds"] >= 2
    assert power["hours"] == pytest.approx(power["seeds"] * 3 / 60)
    page = (tmp_path / "out" / "pilot" / "report.html").read_text(encoding="utf-8")
    assert "these runs are a pilot" in page and 'id="verdicts"' not in page
    again = trained([A, B, C], power=0.02)
    assert again["runs"] == results["runs"] and again["power"]["seeds"] <= power["seeds"]
    later = trained([A, B, C], seeds=4)
    assert later["looks"] == [4] and len(later["verdicts"]) == 2 and "power" not in later
    assert {run["seed"] for run in later["runs"]} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("names", "fields", "says"),
    [
        ([A, B], {"power": 0.0}, "power must be a difference such as 1% or 0.01"),
        ([A, B], {"power": 3.0}, "at most 50% of the loss"),
        ([A], {"power": 0.01}, "name two"),
        ([A, B], {"looks": [4, 1]}, "looks=1 must be at least 2"),
        ([A, B], {"looks": [2.5]}, "looks=2.5 must be a whole number"),
    ],
)
def test_wrong_plans_are_refused_before_anything_is_trained(
    trained: Any, tmp_path: Path, names: list[str], fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError) as caught:
        trained(names, **fields)
    assert says in str(caught.value) and not (tmp_path / "out").exists()


def test_verdict_names_its_size_tokens_and_rates(trained: Any) -> None:
    (verdict,) = trained([A, B + "+recipe.learning_rate=0.0013"], seeds=2)["verdicts"]
    size, tokens, rates = verdict["terms"].split(", ")
    assert size.startswith("at ") and size.endswith("parameters in layers") and tokens == "768 tokens of text.txt"
    assert rates.startswith("lr ") and rates.endswith(" and 1.3e-3")
    assert rate_words(0.0013) == "1.3e-3" and rate_words(1e-3) == "1e-3" and rate_words(0.00125) == "1.25e-3"


def test_compare_command_prints_the_power_plan(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Local, "training", lambda self, place: Stand(noisy, place))
    words = (
        f"compare {A} {B} --data {source} --tokens 768 --batch-size 4 --context 32 --threads 1 --out {tmp_path / 'o'}"
    )
    assert main([*words.split(), "--power", "1%"]) == 0
    told = capsys.readouterr().out
    assert "the paired difference has sd 0.0" in told and "1 % of the loss (0.0" in told and "hours of training" in told
    assert main([*words.split(), "--power", "1%", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["power"]["effect"] == 0.01
    assert main([*words.split(), "--seeds", "3", "--looks", "3,5"]) == 0
    told = capsys.readouterr().out
    assert f"{B} against {A}: " in told and "768 tokens of text.txt, lr " in told and "as planned" in told
    for wrong in (["--power", "much"], ["--power", "0%"], ["--looks", "3;5"], ["--power", "1%", "--tune"]):
        assert main([*words.split(), *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_unplanned_first_look_is_not_noted_as_added_seeds() -> None:
    (note,) = look_notes([3], [4, 8])
    assert "and 3 was not planned" in note and "added" not in note and f"{constant_level([3, 4, 8]):.2%}" in note
    (late,) = look_notes([3, 4], [])
    assert "Seeds were added after a verdict had been seen" in late
