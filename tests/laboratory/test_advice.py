"""The decision guide says what stored results say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import glassformer as gf
from glassformer.cli import main
from glassformer.laboratory.advice import QUESTIONS, advise
from glassformer.laboratory.evidence import claims, known
from glassformer.laboratory.evidence.figure import Figure
from tests.refused import refused


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.asks)
def test_rules_name_claims_and_options_that_exist(question) -> None:
    assert question.asks.endswith("?") and question.goals
    for rule in question.rules:
        assert rule.claim in known() and rule.option in question.options


def test_without_results_nothing_speaks_for_anything(tmp_path: Path) -> None:
    found = advise(goal="chat", claims=tmp_path)
    assert found.questions
    for question in found.questions:
        assert not question.evidence and question.undecided
        assert not any(option.supported_by for option in question.options)


def test_a_stored_verdict_speaks_for_its_option(tmp_path: Path) -> None:
    claims("gqa-cache", out=tmp_path)
    heads = advise(goal="chat", claims=tmp_path).questions[0]
    speaks = {option.name: option.supported_by for option in heads.options}
    assert speaks == {"one for each": (), "a quarter of the heads": ("gqa-cache",), "one for all": ("gqa-cache",)}
    path = tmp_path / "gqa-cache.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    tree["outcome"]["figures"][0].update(value=0.5, low=0.5, high=0.5)
    path.write_text(json.dumps(tree), encoding="utf-8")
    heads = advise(goal="chat", claims=tmp_path).questions[0]
    assert not any(option.supported_by for option in heads.options), "it no longer holds"


def test_costs_are_those_of_the_plan(tmp_path: Path) -> None:
    """llama-3-8b: 8,030,261,248 weights, 131,072 bytes of cache a token with 8 heads of 32, 1 / 8 of it with one."""
    options = {one.name: one for one in advise(goal="chat", memory=20e9, claims=tmp_path).questions[0].options}
    assert options["a quarter of the heads"].state_bytes == 131_072 * 8192
    assert options["one for all"].state_bytes == 131_072 * 8192 / 8
    assert options["a quarter of the heads"].weight_bytes["bfloat16"] == 2 * 8_030_261_248
    assert options["a quarter of the heads"].fits == ("bfloat16", "int8", "int4")
    assert options["one for each"].fits == ("int8", "int4")


@pytest.mark.parametrize(
    ("low", "high", "least", "needed"), [(-1.0, 3.0, 0.0, 12), (-0.5, 1.5, 0.0, 12), (1.0, 3.0, 0.0, None)]
)
def test_seeds_that_would_decide(low: float, high: float, least: float, needed: int | None) -> None:
    """Three seeds and a half width of twice the distance to the bound: four times as many."""
    middle = (low + high) / 2
    assert Figure(name="x", value=middle, low=low, high=high, least=least, count=3).needed == needed


def test_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claims(["gqa-cache", "window-cache"], out=tmp_path)
    assert main(["advise", "--goal", "chat", "--context", "8k", "--memory", "16GB", "--claims", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "gqa-cache" in told and "not known" in told and "How many KV heads" in told
    assert main(["advise", "--goal", "long", "--claims", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["goal"] == "long"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--goal", "fun"], "goal"),
        (["--goal", "chat", "--memory", "much"], "memory"),
        (["--goal", "chat", "--context", "0"], "context"),
        (["--goal", "chat", "--claims", "not there"], "is no folder"),
    ],
)
def test_wrong_requests(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *words]) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_goal_is_refused(tmp_path: Path) -> None:
    with refused(code="unknown", field="goal"):
        gf.advise(goal="fun", claims=tmp_path)


def test_a_quarter_of_the_heads_is_that_of_the_model(tmp_path: Path) -> None:
    for model, groups in (("gpt2", 3), ("llama-3-8b", 8), ("llama-2-70b", 16)):
        found = advise(model, goal="chat", context=1024, memory=1e12, claims=tmp_path)
        changes = [one.change for question in found.questions for one in question.options]
        assert f"+gqa:{groups}" in changes, model
