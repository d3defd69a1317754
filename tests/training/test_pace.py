"""Timed steps: the same number for each model, in turn, after the first ones."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import glassformer as gf
from glassformer.figures.terminal import clock
from glassformer.text import Tokens, prepare
from glassformer.training import Recipe
from glassformer.training import pace as stop_watch
from glassformer.training.pace import (
    DECIDED,
    FIRST,
    STARTED,
    StepPace,
    decided,
    decoding_pace,
    evaluated,
    outlook,
    paces,
    run_seconds,
    spared,
)
from tests.refused import refused


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("a small text about cats and trees\n" * 200, encoding="utf-8")
    return prepare(folder / "text.txt", "char", context=16, cache_dir=folder)


def recipe(**changes: Any) -> Recipe:
    fields = {"steps": 100, "batch_size": 2, "context": 16, "threads": 1, "dtype": "float32", "compile": False}
    return Recipe.of(**{**fields, **changes})


def test_the_median_counts_and_quartiles_are_its_spread():
    found = StepPace((1.0, 2.0, 3.0, 4.0, 100.0), tokens=30)
    assert found.seconds == 3.0 and found.spread == (2.0, 4.0) and found.tokens_per_second == 10.0
    assert StepPace((0.5,), 1).spread == (0.5, 0.5)


def test_a_run_takes_its_start_its_steps_and_its_evaluations():
    """At 100 tokens a second, a forward pass taking .36 of the time of a step."""
    assert run_seconds(5000, 100, 600) == pytest.approx(STARTED + 50 + 2.16)


def test_evaluations_read_no_more_than_the_held_out_text(text: Tokens):
    held = len(text.validation)
    assert evaluated(recipe(evaluation_tokens=10), text) == 8 * 10 + 40
    assert evaluated(recipe(evaluation_tokens=held - 1), text) == 8 * (held - 1) + held
    assert evaluated(recipe(), text) == 9 * held


@pytest.mark.parametrize(
    ("steps", "held", "number"),
    [
        (98, 100_000, 2),  # 100,352 tokens: a tenth pays for 27,876 held-out tokens, less than the contexts' 32,768
        (300, 100_000, 3),  # 307,200 tokens pay for 85,333, without the contexts 52,565
        (300, 3_000, 8),
        (None, 100_000, 8),
    ],
)
def test_a_compared_run_spends_a_tenth_of_its_training_on_evaluations(
    steps: int | None, held: int, number: int
) -> None:
    """By hand: 16,384 held-out tokens at a time, each at .36 of a training token's time, and 8,192 at each of four
    contexts."""
    run = SimpleNamespace(
        steps=steps, recipe=recipe(), text=SimpleNamespace(validation=range(held)),
        batches=SimpleNamespace(tokens_per_step=1024),
    )  # fmt: skip
    assert spared(cast(Any, run)) == number


def test_models_take_turns_and_first_steps_do_not_count(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []
    clock = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    found = list(stop_watch._in_turn({"a": lambda: made.append("a"), "b": lambda: made.append("b")}, 3, None))
    assert made == ["a", "b"] * (FIRST + 3) and found == [("a", 1.0), ("b", 1.0)] * 3


def test_past_its_limit_each_is_timed_once_after_a_first_step(monkeypatch: pytest.MonkeyPatch):
    """The first call, which takes a hundred seconds, does not count."""
    made: list[str] = []
    now = [1.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def step(name: str) -> None:
        now[0] += 1.0 if name in made else 100.0
        made.append(name)

    found = list(stop_watch._in_turn({"a": lambda: step("a"), "b": lambda: step("b")}, 10, 0.0))
    assert made == ["a", "b"] * 2 and found == [("a", 1.0), ("b", 1.0)]


def test_an_outlook_adds_up_starting_training_and_evaluations():
    """Twice: half a minute of training, forward passes at .36 of its time, ten seconds to start."""
    plan = recipe(steps=None, minutes=0.5, evaluation_tokens=1000)
    beyond = stop_watch.FORWARD * stop_watch.PASSES * 1000 / 100
    text = outlook(plan, 100.0, starting=10.0, runs=2)
    assert "starting (0:10)" in text and f"about {clock(2 * (30 + beyond + 10))} in all" in text
    assert "in all" not in outlook(plan, 100.0)


def test_steps_are_those_of_the_trainer(text: Tokens, monkeypatch: pytest.MonkeyPatch):
    """The loop's own step is called on runs of the recipe; a slower step has a longer time."""
    seen: list[tuple[str, int]] = []
    step, now = stop_watch.one_step, [0.0]

    def watched(run: Any) -> None:
        seen.append((run.recipe.optimizer.kind, run.config.vocab_size))
        now[0] += 2.0 if run.recipe.optimizer.kind == "lion" else 0.5
        step(run)

    monkeypatch.setattr(stop_watch, "one_step", watched)
    monkeypatch.setattr(stop_watch, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    config = gf.preset("llama@0.05m+vocab_size=100")
    found = paces({"slow": (config, recipe(optimizer="lion")), "fast": (config, recipe())}, text, steps=3)
    assert seen == [("lion", 100), ("adamw", 100)] * (FIRST + 3)
    assert found["slow"].tokens == found["fast"].tokens == 32
    assert found["slow"].steps == (2.0,) * 3 and found["fast"].steps == (0.5,) * 3


def test_a_model_that_cannot_be_trained_so_is_refused(text: Tokens):
    with refused(code="causal", field="objective"):
        paces({"llama": (gf.preset("llama@0.05m+vocab_size=100"), recipe(objective="masked"))}, text)


@pytest.mark.parametrize("name", ["llama@0.05m", "mamba@0.05m", "t5@0.05m"])
def test_a_decoding_step_writes_a_token_to_each_sequence(name: str):
    found = decoding_pace(gf.preset(f"{name}+vocab_size=64+context=16"), 3, 16, steps=2)
    assert found.tokens == 3 and len(found.steps) == 2 and found.seconds > 0


def test_estimates_take_the_stop_watch_for_a_folder_of_text(tmp_path: Path):
    """A text without room for a batch is refused by what prepares a run, not timed."""
    (tmp_path / "text.txt").write_text("cats and trees\n" * 40, encoding="utf-8")
    short = prepare(tmp_path / "text.txt", "char", cache_dir=tmp_path)
    with refused(code="range", field="context"):
        paces({"llama": (gf.preset("llama@0.05m+vocab_size=100"), recipe(context=4096))}, short)


@pytest.mark.parametrize(
    ("speed", "batch", "held_out"),
    [
        (20_000.0, 16, 16_384),  # 1,200,000 tokens are 4,687 steps; a tenth of them pays for 23,809 held-out tokens
        (800.0, 8, 944),  # 48,000 tokens are 187 steps of 16 x 16 and 375 of 8 x 16; a tenth pays for 952: 59 windows
        (10.0, 4, 64),  # 600 tokens are 9 steps of the smallest batch; four windows are the least
    ],
)
def test_a_minute_has_many_steps_and_few_evaluations(
    text: Tokens, monkeypatch: pytest.MonkeyPatch, speed: float, batch: int, held_out: int
):
    """By hand, at a given speed: 200 steps if a batch of 4 or more has them; 8 evaluations, 4 times their tokens at
    the end and 2 at several contexts, each token at .36 of a step's, in a tenth of the minute."""
    monkeypatch.setattr(stop_watch, "paces", lambda models, *rest, **options: {"a": StepPace((1.0,), speed)})
    plan = recipe(steps=None, minutes=1, batch_size=16)
    config = gf.preset("llama@0.1m").replace(vocab_size=64)
    found, measured = decided({"a": (config, plan)}, text, DECIDED)
    assert (found, measured) == ({"batch_size": batch, "evaluation_tokens": held_out}, speed)
    assert decided({"a": (config, plan)}, text, ()) == ({}, speed)
    assert f"{round(60 * speed / (batch * 16)):,} steps of {batch} x 16" in outlook(plan.replace(**found), speed)
