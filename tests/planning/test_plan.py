"""Plans against the built models; `test_generic.py` has the states."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.cli import main
from glassformer.parts.core.cost import Shape
from tests.refused import refused


def test_weights_are_those_of_the_model():
    for name in ("gpt2@1m", "llama@1m+untied", "bloom@1m", "llama@1m+moe:4:2"):
        cost = gf.plan(gf.preset(name))
        model = gf.preset(name).outline().bfloat16()
        assert cost.weight_bytes == sum(weight.nbytes for weight in model.parameters())
        assert cost.bytes_read <= cost.bytes


def test_fewer_heads_cost_less_and_a_window_stops_growing():
    """SmolLM2 has a third of the heads; figures of published configs by hand: 2 layers heads h bytes."""
    third, full = (gf.plan(gf.preset(name)) for name in ("smollm2-135m", "smollm2-135m+mha"))
    assert 3 * third.state_bytes_per_token == full.state_bytes_per_token == 2 * 30 * 9 * 64 * 2
    window = gf.plan(gf.preset("smollm2-135m+window:256"))
    assert window.next_token_bytes == 0 and window.state_bytes == 256 * third.state_bytes_per_token
    assert third.next_token_bytes == third.state_bytes_per_token
    assert gf.plan(gf.preset("llama-2-70b")).state_bytes_per_token == 2 * 80 * 8 * 128 * 2
    assert gf.plan(gf.preset("mamba-130m")).next_token_bytes == 0


KINDS = {
    "llama@1m": {"cache"}, "gpt-oss-20b": {"cache", "window"}, "mamba-130m": {"recurrent"},
    "deepseek-v2-lite": {"latent"}, "jamba-v0.1": {"cache", "recurrent"}, "t5-small": {"cache", "source"},
    "bert-base": set(),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_plan_lists_states_by_kind(name: str):
    config = gf.preset(name)
    cost = gf.plan(config, context=64 if config.encoder else 512)
    assert set(cost.states) == KINDS[name]
    assert cost.state_bytes == (config.state_bytes(cost.context) if config.causal else 0)
    assert cost.to_dict()["states"] == cost.states


def test_an_encoder_is_read_before_the_first_token():
    """A written token reads no encoder and adds none of the source's keys."""
    config = gf.preset("t5-small")
    cost = gf.plan(config)
    encoder = config.costs(Shape(s=1, t=1, phase="decode"))["encoder"].parameters
    assert cost.read_parameters <= cost.parameters - encoder + config.vocab_size * config.d_model
    assert cost.next_token_bytes == cost.states["cache"] // cost.context == 2 * 2 * 6 * 512
    assert {one.name for one in cost.components} >= {"encoder mixer", "encoder ffn", "mixer", "ffn", "embedding"}
    ffn = next(one for one in cost.components if one.name == "encoder ffn")
    assert ffn.symbols == "L_e * (2 * f * d)" and ffn.parameters == 6 * 2 * 2048 * 512


def test_bidirectional_model_has_no_decoding_plan(capsys: pytest.CaptureFixture[str]):
    cost = gf.plan(gf.preset("bert-base"), machine="h100")
    assert cost.decoding is None and cost.state_bytes == cost.next_token_bytes == 0
    assert cost.context_that_fits(80e9) == 512 and cost.batch_that_fits(80e9) == 1
    assert main(["plan", "bert-base", "--gpu", "h100"]) == 0
    assert main(["plan", "bert-base", "--generate"]) == 2
    assert "bidirectional" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"context": 0}, "context"),
        ({"context": 1 << 40}, "context"),
        ({"batch": 0}, "batch"),
        ({"context": 1025}, "context"),
    ],
)
def test_impossible_plan_is_refused(asked: dict[str, int], field: str):
    with refused(code="range", field=field):
        gf.plan(gf.preset("gpt2"), **asked)  # type: ignore[operator]


def test_plan_command_prints_the_functions_values(tmp_path: Path):
    command = [sys.executable, "-m", "glassformer", "plan", "llama-7b", "gpt2@1m+gqa:2", "--batch", "3"]
    told, facts = (
        subprocess.run([*command, *more], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
        for more in ([], ["--state-dtype", "int8", "--json"])
    )
    assert "6,738,415,616" in told and "3 sequences" in told
    first, second = json.loads(facts)
    assert first["name"] == "llama-7b" and first["weight_bytes"] == 2 * 6_738_415_616
    config = gf.preset("gpt2@1m+gqa:2")
    assert second["state_bytes"] == config.state_bytes(config.context, torch.int8)
    assert second["bytes"] == second["weight_bytes"] + 3 * second["state_bytes"]
