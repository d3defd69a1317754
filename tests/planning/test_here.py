"""Planning on this processor: operations are counted as they run, rates lie between those that were measured."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.cli import main
from glassformer.planning import here as planning_here
from glassformer.planning import processor as planning_processor
from glassformer.planning.here import Profile, here, time_of, working
from glassformer.planning.operations import Listed, calls_of_step, calls_of_token
from glassformer.planning.processor import BYTES, KINDS, SETS, SIDES, Measured, _products, least, shortest


def measured(overhead: float = 0.0, moved: float = 1e30) -> Measured:
    """Products at 1 GFLOP/s whatever their size."""
    products = {" ".join(map(str, key)): 1e9 for key in _products("float32", decoding=True)}
    return Measured(overhead, 0.0, products, {f"{kind} {size}": moved for kind in KINDS for size in BYTES}, 0.0)


def profile(overhead: float = 0.0, moved: float = 1e30) -> Profile:
    return Profile("a processor", "a torch", 1, "float32", measured(overhead, moved), {}, {})


def test_products_are_the_flops_of_the_model():
    """At one rate for all, the time of the products is that of the FLOPs that the config counts."""
    config = gf.preset("gpt2@1m+vocab_size=65+kernel=naive")
    found = time_of(calls_of_step(config, 2, 64, torch.float32), profile(), {})
    assert found["products"] == pytest.approx(3 * config.flops(64) * 128 / 1e9, rel=0.02)
    assert found["calls"] == 0 and found["elementwise"] < 1e-12


@pytest.mark.parametrize("name", ["llama@1m+vocab_size=65", "gpt2@1m+vocab_size=65+mqa"])
def test_fake_operations_are_those_that_run(name: str):
    """By name, number and FLOPs, but for the way back of fused attention and what autograd adds up."""
    config = gf.preset(name)
    model, tokens = config.build(seed=0), torch.zeros(2, 32, dtype=torch.int64)
    with Listed() as ran:
        model.loss(tokens, tokens).backward()
    fake = calls_of_step(config, 2, 32, torch.float32)
    assert sum(fake.values()) == pytest.approx(sum(ran.calls.values()), rel=0.02)
    assert sum(call.flops * n for call, n in fake.items()) == sum(call.flops * n for call, n in ran.calls.items()) > 0
    state = model.eval().init_state(2, 32)
    with torch.no_grad(), Listed() as ran:
        model(tokens[:, :31], state)
    with torch.no_grad(), Listed() as ran:
        model(tokens[:, :1], state)
    fake = calls_of_token(config, 2, 32)
    assert sum(fake.values()) == pytest.approx(sum(ran.calls.values()), rel=0.02)


def test_rates_lie_between_those_measured():
    by = measured()
    by.products[f"float32 1 256 256 {SIDES[-2]} {SETS[-1]}"] = 4e9
    assert by.rate_of_product("float32", 1, 256, 256, SIDES[-2]) == pytest.approx(4e9)
    assert 1e9 < by.rate_of_product("float32", 1, 256, 256, 512) < 4e9
    assert by.rate_of_product("float32", 1, 1, 1, 1) == pytest.approx(1e9)
    assert by.rate_of_product("float32", 1, 4096, 4096, 4096) == pytest.approx(1e9), "as what was measured nearest"
    assert by.rate_of_bytes("plain", 1) == pytest.approx(by.moved[f"plain {BYTES[0]}"])


def test_a_model_that_caches_hold_reads_its_weights_faster():
    """Rates of products of few rows fall from 4 to 1 GFLOP/s with the working set: a small model has the first."""
    by = profile()
    by.measured.products.update({key: 4e9 for key in by.measured.products if key.endswith(f" {SETS[0]}")})
    small, large = (gf.preset(f"gpt2@{size}+vocab_size=512+kernel=naive") for size in ("1m", "10m"))
    for config, rate in ((small, 2.5e9), (large, 1e9)):
        calls = calls_of_token(config, 1, 64)
        found, read = time_of(calls, by, {}, working("token", calls)), working("token", calls)
        assert read == pytest.approx(4 * (config.num_params() - 512 * 2), rel=0.2)
        assert sum(call.flops * n for call, n in calls.items()) / found["products"] == pytest.approx(rate, rel=0.35)


def test_encoder_decoders_are_planned_too():
    found = here(gf.preset("t5@1m+vocab_size=512"), 2, 32, profile())
    assert found.step_seconds > 0 and found.token is not None and found.token["products"] > 0


def test_seconds_become_rates():
    """Of a product 2 m k n FLOPs, of a batch as many times; what was shorter counts."""
    seconds: dict[Any, float] = {"chain": 1e-4, "views": 1e-3, "optimizer": 2.0**21 * 1e-9}
    seconds |= dict.fromkeys(_products("float32", decoding=True), 1e-3)
    seconds |= {(kind, size): 1e-3 for kind in KINDS for size in BYTES}
    least(seconds, {("float32", 1, 16, 64, 256, SETS[0]): 1e-4, ("float32", 16, 1, 64, 64, SETS[0]): 1.0})
    found = planning_processor.measured(seconds)
    assert found.products[f"float32 1 16 64 256 {SETS[0]}"] == pytest.approx(2 * 16 * 64 * 256 / 1e-4)
    assert found.products[f"float32 16 1 64 64 {SETS[0]}"] == pytest.approx(2 * 16 * 64 * 64 / 1e-3)
    assert found.moved[f"plain {BYTES[1]}"] == BYTES[1] / 1e-3 and found.optimizer == pytest.approx(1e-9)
    assert 0 < found.overhead < 1e-4 and math.isfinite(found.view)


def test_references_can_be_built():
    for config, batch, context in planning_here.references():
        assert config.num_params() > 0 and batch * context <= config.context * batch


def test_the_shortest_burst_counts():
    made: list[str] = []
    found = shortest({"a": lambda: made.append("a"), "b": lambda: made.append("b")}, rounds=2, least=0.0)
    assert sorted(found) == ["a", "b"] and made.count("a") == made.count("b") == 4
    assert all(0 < each < 1 for each in found.values())


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
    made: list[Profile] = []

    def calibrated(by: Profile) -> Profile:
        made.append(replace(by, measured=measured()))
        return made[-1]

    monkeypatch.setattr(planning_here, "_calibrated", calibrated)
    first = planning_here.profile()
    assert planning_here.profile() == first and len(made) == 1
    assert planning_here.profile(again=True) == first and len(made) == 2
    file = tmp_path / "planned.json"
    for damaged in ("[", file.read_text(encoding="utf-8").replace('"overhead"', '"overheard"')):
        file.write_text(damaged, encoding="utf-8")
        made.clear()
        assert planning_here.profile() == first and len(made) == 1


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
