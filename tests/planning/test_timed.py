"""Plans of this machine are measurements: steps of each model, timed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import glassformer as gf
from glassformer import machine
from glassformer.cli import main
from glassformer.config import ModelConfig
from glassformer.planning import Timed, timed
from glassformer.planning.timed import objective_of
from glassformer.training import pace
from tests.refused import refused

SMALL = "llama@0.05m+vocab_size=65"


@pytest.mark.parametrize(
    ("name", "objective", "decodes"),
    [
        (SMALL, "next_token", True), ("t5@0.05m+vocab_size=256", "span", True),
        ("llama@0.05m+vocab_size=65+bidirectional", "masked", False),
    ],
)  # fmt: skip
def test_every_kind_of_model_is_timed(name: str, objective: str, decodes: bool):
    assert objective_of(gf.preset(name)).kind == objective
    found = gf.plan(name, here=True, batch=2, context=32)
    assert isinstance(found, Timed) and found.step_seconds > 0 and (found.token is not None) == decodes
    assert found.step.spread[0] <= found.step_seconds <= found.step.spread[1]
    assert ("a step of decoding" in str(found)) == decodes


def test_the_verb_times_models_side_by_side(capsys: pytest.CaptureFixture[str]):
    command = ["plan", SMALL, "gpt2@0.05m+vocab_size=65", "--here", "--batch", "2", "--context", "16"]
    assert main([*command, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], first["batch"], first["context"]) == (SMALL, 2, 16)
    assert first["tokens_per_second"] == pytest.approx(32 / first["step_seconds"])
    assert second["token_spread"][0] <= second["token_seconds"] <= second["token_spread"][1]
    assert main(["plan", "--here"]) == 2


def test_a_workload_that_cannot_be_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch):
    built: list[object] = []
    monkeypatch.setattr(ModelConfig, "build", lambda *_, **__: built.append(1))
    for asked, field in (({"batch": 0}, "batch"), ({"context": 0}, "context"), ({"context": "2M"}, "context")):
        with refused(code="range", field=field):
            gf.plan([SMALL, "gpt2@1m"], here=True, **asked)  # type: ignore[arg-type]
    monkeypatch.setattr(machine, "free_memory", lambda device: 10**6)
    with refused(code="memory", field="here"):
        timed.timed({"gpt2": gf.preset("gpt2")}, 16, 1)
    assert not built


IN_TURN = pace._in_turn


@pytest.mark.parametrize(("timed_before", "steps", "tokens"), [(22, [10, 2], [10, 0]), (12, [10], [2])])
def test_steps_timed_before_a_stop_come_out(
    timed_before: int,
    steps: list[int],
    tokens: list[int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """The second of two models is stopped after two steps, or the first after two steps of decoding."""

    def stop() -> None:
        left = iter(range(timed_before))

        def stopped(*asked: Any) -> Iterator[tuple[str, float]]:
            for one in IN_TURN(*asked):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                yield one

        monkeypatch.setattr(pace, "_in_turn", stopped)

    command = ["plan", SMALL, "gpt2@0.05m+vocab_size=65", "--here", "--batch", "2", "--context", "16"]
    stop()
    assert main([*command, "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert found["error"]["code"] == "stopped" and len(found["results"]) == len(steps)
    stop()
    assert main(command) == 130 and "tokens a second" in capsys.readouterr().out
    stop()
    with pytest.raises(KeyboardInterrupt) as caught:
        gf.plan(command[1:3], here=True, batch=2, context=16)
    plans = caught.value.so_far  # type: ignore[attr-defined]
    assert [len(one.step.steps) for one in plans] == steps
    assert [0 if one.token is None else len(one.token.steps) for one in plans] == tokens


def test_a_timed_plan_has_no_page(tmp_path: object):
    with refused(code="conflict", field="out"):
        gf.plan(SMALL, here=True, out="plan.html")
