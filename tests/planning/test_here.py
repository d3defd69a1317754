"""Planning on this processor: operations are counted as they run, rates lie between those that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.cli import main
from glassformer.planning import here as planning_here
from glassformer.planning.here import BYTES, HEADS, KINDS, ROWS, SIDES, Listed, Profile, calls_of_step, here, time_of


def profile(overhead: float = 0.0, moved: float = 1e30) -> Profile:
    """Products at 1 GFLOP/s whatever their size."""
    products = {
        f"float32 {heads} {m} {k} {n}": 1e9 for heads in (1, HEADS) for m in ROWS for k in SIDES for n in SIDES
    }  # fmt: skip
    rates = {f"{kind} {size}": moved for kind in KINDS for size in BYTES}
    return Profile("a processor", "a torch", 1, "float32", overhead, 0.0, products, rates, 0.0, {}, {})


def test_products_are_the_flops_of_the_model():
    """At one rate for all, the time of the products is that of the FLOPs that the config counts."""
    config = gf.preset("gpt2@1m+vocab_size=65+kernel=naive")
    found = time_of(calls_of_step(config, 2, 64, torch.float32), profile(), {})
    assert found["products"] == pytest.approx(3 * config.flops(64) * 128 / 1e9, rel=0.02)
    assert found["calls"] == 0 and found["elementwise"] < 1e-12


def test_fake_products_are_those_that_run():
    config = gf.preset("llama@1m+vocab_size=65")
    model, tokens = config.build(seed=0), torch.zeros(2, 32, dtype=torch.int64)
    with Listed() as ran:
        model.loss(tokens, tokens).backward()
    both = (ran.calls, calls_of_step(config, 2, 32, torch.float32))
    real, fake = (sum(call[2] * times for call, times in calls.items()) for calls in both)
    assert real == fake > 0


def test_rates_lie_between_those_measured():
    by = profile()
    by.products[f"float32 1 256 256 {SIDES[-1]}"] = 4e9
    assert by.rate_of_product("float32", 1, 256, 256, SIDES[-1]) == pytest.approx(4e9)
    assert 1e9 < by.rate_of_product("float32", 1, 256, 256, 512) < 4e9
    assert by.rate_of_product("float32", 1, 1, 1, 1) == pytest.approx(1e9)
    assert by.rate_of_bytes("plain", 1) == pytest.approx(by.moved[f"plain {BYTES[0]}"])


def test_parts_add_up_and_factors_count():
    config = gf.preset("llama@1m+vocab_size=65")
    by = profile(overhead=1e-6, moved=1e9)
    found = here(config, 2, 32, by)
    assert found.step_seconds == pytest.approx(sum(found.step.values()))
    twice = time_of(calls_of_step(config, 2, 32, torch.float32), by, {"products": 2.0})
    assert twice["products"] == pytest.approx(2 * found.step["products"]) and twice["calls"] == found.step["calls"]
    assert found.token is not None and found.token["products"] < found.step["products"]
    assert here(gf.preset("llama@1m+vocab_size=65+bidirectional"), 2, 32, by).token is None


def test_a_measurement_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Once for a processor; a damaged file is measured again."""
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    measured: list[str] = []
    known: dict[str, Any] = {
        name: getattr(profile(), name) for name in ("overhead", "view", "products", "moved", "optimizer")
    }

    def measure(dtype: str) -> dict[str, Any]:
        measured.append(dtype)
        return known

    monkeypatch.setattr(planning_here, "_measure", measure)
    monkeypatch.setattr(planning_here, "_calibrated", lambda by: by)
    first = planning_here.profile()
    assert planning_here.profile() == first and len(measured) == 1
    assert planning_here.profile(again=True) == first and len(measured) == 2
    (tmp_path / "planned.json").write_text("[", encoding="utf-8")
    assert planning_here.profile() == first and len(measured) == 3


def test_the_verb_plans_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planning_here, "profile", profile)
    command = ["plan", "llama@1m+vocab_size=65", "--here", "--batch", "2", "--context", "32"]
    assert main(command) == 0
    assert "a step of decoding" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["step_seconds"] == here(gf.preset("llama@1m+vocab_size=65"), 2, 32, profile()).step_seconds
    assert main([*command, "--gpu", "h100"]) == 2
    assert main(["plan", "--here"]) == 2
