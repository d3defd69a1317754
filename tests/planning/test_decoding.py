"""Decoding times: published rates are within the range, and at the turning point reading and computing are equal."""

from __future__ import annotations

import json

import pytest

import glassformer as gf
from glassformer.cli import main
from glassformer.planning.decoding import Decoding


def decoding(name: str, machine: str, **asked: int) -> Decoding:
    found = gf.plan(gf.preset(name), machine=machine, **asked).decoding
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "count", "rate"),
    [
        ("llama-7b", 1, 104.9), ("llama-7b", 2, 168.84), ("llama-7b", 4, 254.02), ("llama-7b", 8, 328.43),
        ("llama-2-70b", 2, 21.32), ("llama-2-70b", 4, 38.01), ("llama-2-70b", 8, 62.50),
        ("mixtral-8x7b", 2, 78.75), ("mixtral-8x7b", 4, 118.23), ("mixtral-8x7b", 8, 203.69),
    ],
)  # fmt: skip
def test_published_decoding_rates_are_in_the_planned_range(name: str, count: int, rate: float):
    """pytorch-labs/gpt-fast, README at 0f925b5 and mixtral-moe/README at 056f8fb: bf16, A100 of 80 GB, one sequence."""
    least, most = decoding(name, f"a100-80gb:{count}", context=200).tokens_per_second
    assert least <= rate <= most


def test_where_a_batch_turns():
    """Without states, weights N read once against 2 N FLOPs each: the batch is peak / bandwidth for bf16."""
    one = decoding("llama-7b", "h100", context=1)
    assert one.turning_batch == pytest.approx(989.5e12 / 3.35e12, rel=0.02)
    read, compute, _ = one.roof(one.turning_batch)
    assert read <= compute
    read, compute, _ = one.roof(one.turning_batch - 1)
    assert compute < read
    assert decoding("llama-7b", "h100", context=2048).turning_batch is None, "its states grow faster"


def test_a_batch_meets_more_experts():
    one = decoding("mixtral-8x7b", "h100:2", context=1)
    plan = one.plan
    assert one.bytes_read(1) == pytest.approx(plan.bytes_read)
    assert one.bytes_read(1000) == pytest.approx(2 * (plan.parameters - 32_000 * 4096), rel=0.01)


def test_costs_follow_time():
    one = gf.plan(gf.preset("llama-7b"), machine="h100", price="3.6USD", batch=4).decoding
    assert one is not None and one.cost_per_million is not None
    least, most, currency = one.cost_per_million
    assert currency == "USD" and least == pytest.approx(1e6 / one.tokens_per_second[1] / 1000)
    assert most == pytest.approx(1e6 / one.tokens_per_second[0] / 1000)


def test_plan_command_prints_decoding(capsys: pytest.CaptureFixture[str]):
    command = ["plan", "llama-7b", "--generate", "--gpu", "h100", "--batch", "8", "--price", "2USD"]
    assert main(command) == 0
    assert "a million tokens cost" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    found = gf.plan(gf.preset("llama-7b"), machine="h100", batch=8, price="2USD").decoding
    assert found is not None and facts["decoding"] == json.loads(json.dumps(found.to_dict()))
