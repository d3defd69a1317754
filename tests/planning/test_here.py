"""Planning on this processor: operations are counted as they run, rates lie between those that were measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer import machine
from glassformer.cli import main
from glassformer.planning import here as planning_here
from glassformer.planning import processor as planning_processor
from glassformer.planning.here import PARTS, Profile, here, time_of, working
from glassformer.planning.operations import Call, Listed, calls_of_step, calls_of_token
from glassformer.planning.processor import BYTES, KINDS, SETS, SIDES, Measured, _products, least, shortest


def measured(overhead: float = 0.0, moved: float = 1e18) -> Measured:
    """Products at 1 GFLOP/s whatever their size."""
    products = {" ".join(map(str, key)): 1e9 for key in _products("float32", decoding=True)}
    rates = {f"{kind} {size}": moved for kind in KINDS for size in BYTES}
    return Measured(overhead=overhead, view=0.0, products=products, moved=rates, optimizer=0.0)


def profile(overhead: float = 0.0, moved: float = 1e18) -> Profile:
    factors = dict.fromkeys(PARTS, 1.0)
    return Profile(
        processor="a processor", torch="a torch", threads=1, dtype="float32", measured=measured(overhead, moved),
        step_factors=factors, token_factors=factors,
    )  # fmt: skip


def test_products_are_the_flops_of_the_model():
    """At one rate for all, the time of the products is that of the FLOPs that the config counts."""
    config = gf.preset("gpt2@1m+vocab_size=65+kernel=naive")
    found = time_of(calls_of_step(config, 2, 64, torch.float32), measured(), "float32", {})
    assert found["products"] == pytest.approx(3 * config.flops(64) * 128 / 1e9, rel=0.02)
    assert found["calls"] == 0 and found["elementwise"] < 1e-9


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
        found, read = time_of(calls, by.measured, by.dtype, {}, working("token", calls)), working("token", calls)
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
    twice = time_of(calls_of_step(config, 2, 32, torch.float32), by.measured, by.dtype, {"products": 2.0})
    assert twice["products"] == pytest.approx(2 * found.step["products"]) and twice["calls"] == found.step["calls"]
    assert found.token is not None and found.token["products"] < found.step["products"]
    assert here(gf.preset("llama@1m+vocab_size=65+bidirectional"), 2, 32, by).token is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_softmax", "softmax"), ("_log_softmax", "softmax"), ("_softmax_backward_data", "softmax"), ("amax", "summed"),
        ("logsumexp", "summed"), ("native_layer_norm", "summed"), ("exp", "curved"), ("rsqrt", "curved"),
        ("gelu_backward", "curved"), ("maximum", "plain"), ("logical_and", "plain"), ("mul", "plain"),
    ],
)  # fmt: skip
def test_an_operation_has_the_rate_of_its_kind(name: str, kind: str):
    assert planning_here.kind_of(name) == kind
    by = measured()
    by.moved.update({key: 1e9 for key in by.moved if key.startswith(kind)})
    (seconds,) = (time_of({Call(name, moved=1 << 20): 1}, by, "float32", {})["elementwise"],)
    assert seconds == pytest.approx((1 << 20) / 1e9)


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads of each measurement."""
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    made: list[int] = []

    def fake(dtype: str) -> dict[str, Any]:
        made.append(torch.get_num_threads())
        by = profile()
        both = by.measured.products | {f"{dtype} {key.split(' ', 1)[1]}": 1e9 for key in by.measured.products}
        factors = {"step_factors": by.step_factors, "token_factors": by.token_factors}
        return {"measured": by.measured.vary(products=both), **factors}

    monkeypatch.setattr(planning_here, "_calibrated", fake)
    return made


def test_a_measurement_is_kept(calibrated: list[int], monkeypatch: pytest.MonkeyPatch):
    """Once for a processor and a version of ours, with the threads of training; more can be asked for."""
    before = torch.get_num_threads()
    first = planning_here.profile()
    assert planning_here.profile() == first and calibrated == [machine.settings("cpu").threads]
    assert planning_here.profile(again=True) == first and len(calibrated) == 2
    assert planning_here.profile(threads=3).threads == 3 and calibrated[2:] == [3]
    assert torch.get_num_threads() == before
    monkeypatch.setattr(planning_here, "__version__", "another")
    planning_here.profile()
    assert len(calibrated) == 4


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("measured", "overhead"), "1e-6"), (("measured", "overhead"), None), (("measured", "view"), -1e-6),
        (("measured", "view"), math.nan), (("measured", "optimizer"), math.inf), (("measured", "products"), {}),
        (("measured", "moved"), {}), (("measured",), []), (("step_factors",), {}), (("dtype",), None),
        (("token_factors", "calls"), -1.0), (("token_factors", "calls"), True), (("more",), 1),
        (("measured", "overheard"), 1e-6), (("measured", "products", f"float32 1 1 64 64 {SETS[0]}"), 0.0),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_is_measured_again(
    calibrated: list[int], tmp_path: Path, place: tuple[str, ...], value: object
):
    first = planning_here.profile()
    file = tmp_path / "planned.json"
    kept = json.loads(file.read_text(encoding="utf-8"))
    (inside,) = kept.values()
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = value
    file.write_text(json.dumps(kept), encoding="utf-8")
    assert planning_here.profile() == first
    assert len(calibrated) == (1 if place == ("dtype",) else 2), "what names the machine is not read from the file"


def test_a_damaged_file_is_measured_again(calibrated: list[int], tmp_path: Path):
    first = planning_here.profile()
    (tmp_path / "planned.json").write_text("[", encoding="utf-8")
    assert planning_here.profile() == first and len(calibrated) == 2


def test_what_cannot_be_is_refused_before_anything_is_measured(calibrated: list[int]):
    for asked in (["--batch", "0"], ["--batch", "-1"], ["--context", "0"], ["--context", "2M"]):
        assert main(["plan", "gpt2@1m", "--here", *asked]) == 2
    assert not calibrated


def test_the_verb_plans_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []

    def kept(again: bool) -> Profile:
        asked.append(again)
        return profile()

    monkeypatch.setattr(planning_here, "profile", kept)
    command = ["plan", "llama@1m+vocab_size=65", "--here", "--batch", "2", "--context", "32"]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "a step of decoding" in told and "--again measures anew" in told
    assert main([*command, "--json", "--again"]) == 0
    assert asked == [False, True]
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["step_seconds"] == here(gf.preset("llama@1m+vocab_size=65"), 2, 32, profile()).step_seconds
    assert main([*command, "--gpu", "h100"]) == 2
    assert main(["plan", "--here"]) == 2
