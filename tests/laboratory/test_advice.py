"""The decision guide says what stored results say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import glassformer as gf
from glassformer.cli import main
from glassformer.laboratory.advice import QUESTIONS, advise
from glassformer.laboratory.composed import loss_effect
from glassformer.laboratory.evidence import claims, known
from glassformer.laboratory.evidence.figure import Figure
from glassformer.laboratory.evidence.stored import MEASURED, read
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
    """Three seeds and a half width of twice the distance to the bound need four times the seeds."""
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
        (["--goal", "chat", "--claims", "not there"], "is not a folder"),
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


GOALS = ("chat", "long", "train", "fast", "simple", "balanced")


@pytest.mark.parametrize("goal", GOALS)
def test_advice_ends_in_a_model_with_its_plan(goal: Any) -> None:
    """The expression builds, and its figures are those that `plan` has of it."""
    found = advise("gpt2@1m", goal=goal, context=512, memory=1e9)
    made = found.advised
    assert made.expression == "gpt2@1m" + "".join(made.changes)
    expected = gf.plan(f"{made.expression}+context=512", context=512)
    after = made.after
    assert (after.parameters, after.weight_bytes["bfloat16"], after.state_bytes) == (
        expected.parameters, expected.weight_bytes, expected.state_bytes
    )  # fmt: skip
    assert after.flops == expected.flops and after.fits == ("bfloat16", "int8", "int4")
    ranked = [one.loss or 0.0 for one in made.priorities]
    assert ranked == sorted(ranked) and made.priorities
    assert all(one.supported_by and (one.present or one.change in made.changes) for one in made.priorities)
    assert found.to_dict()["advised"]["expression"] == made.expression and made.expression in str(found)


def test_without_results_a_model_stays_as_it_is_or_becomes_simple(tmp_path: Path) -> None:
    for goal in ("chat", "fast", "balanced"):
        made = advise("llama@1m", goal=goal, context=512, memory=1e9, claims=tmp_path).advised  # type: ignore[arg-type]
        assert made.expression == "llama@1m" and not made.priorities and made.before == made.after
    simple = advise("llama@1m", goal="simple", context=512, memory=1e9, claims=tmp_path).advised
    assert simple.expression == "llama@1m+learned+relu"


def test_for_speed_the_smallest_state_wins(tmp_path: Path) -> None:
    claims("gqa-cache", out=tmp_path)
    fast, chat = (
        advise("gpt2@10m", goal=goal, context=512, memory=1e9, claims=tmp_path).advised.changes[:1]  # type: ignore[arg-type]
        for goal in ("fast", "chat")
    )
    assert (fast, chat) == (("+mqa",), ("+gqa:2",))


def test_positions_of_the_guides_are_options() -> None:
    found = next(one for one in QUESTIONS if one.asks == "Which positions?")
    assert {"+learned", "+sinusoidal", "+rope", "+alibi", "+nope"} == set(found.options.values())


@pytest.mark.parametrize(
    ("claim", "word", "others", "expected"),
    [
        ("swiglu", "swiglu", ["relu", "gelu"], -0.04 / 2.5),
        ("relu", "relu", ["gelu"], -0.06 / 2.4),  # its own word is that of the first arm
        ("linear", "causal", ["linear_attention"], -0.03 / 2.0),  # the other option is the second arm
        ("biases", "nobias", ["bias"], 0.001),  # as a share already
        ("warmup", "pre", ["post"], None),  # neither arm is an option
        ("speed", "rmsnorm", ["layernorm"], None),
    ],
)
def test_sign_of_the_effect_on_the_loss(claim: str, word: str, others: list[str], expected: float | None) -> None:
    figures = {
        "swiglu": [("loss of a+swiglu less that of a", -0.04), ("loss of a", 2.5)],
        "relu": [("loss of a less that of a+relu", 0.06), ("loss of a+relu", 2.4)],
        "linear": [("loss of a+linear_attention less that of a", 0.03), ("loss of a", 2.0)],
        "biases": [("loss of a+nobias less that of a, in shares of it", 0.001)],
        "warmup": [("loss of a+recipe.warmup=0 less that of a", 0.1), ("loss of a", 2.0)],
        "speed": [("LayerNorm over RMSNorm", 1.2)],
    }[claim]
    held = read(MEASURED, "swiglu-beats-gelu")
    assert held is not None
    made = [Figure(name=name, value=value, most=None if at else 0.0) for at, (name, value) in enumerate(figures)]
    stored = held.model_copy(update={"outcome": held.outcome.model_copy(update={"figures": tuple(made)})})
    found = loss_effect(stored, word, others)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_advice_gives_no_warnings_of_options_that_are_only_counted(recwarn: pytest.WarningsRecorder) -> None:
    advise(goal="chat")
    assert not [one for one in recwarn if "undoes" in str(one.message) or "leaves out" in str(one.message)]
