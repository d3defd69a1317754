"""Errors of rules and calculators that are often used, each against the answer from the config."""

from __future__ import annotations

import pytest
import torch

import glassformer as gf
from experiments.plan import calculators as rules
from experiments.plan.document import PAGE, written
from glassformer.parts.core.cost import Shape


def test_rules_are_exact_for_their_original_models():
    """12 L d^2 for GPT-2's matrices, 2 L H d where every head has keys, the cookbook's count of an untied LLaMA."""
    layers = gf.preset("gpt2").costs(Shape(s=1, t=1, phase="prefill"))["layers"].parameters
    assert rules.twelve(rules.SHAPES["gpt2"]) - 50257 * 768 == pytest.approx(layers, rel=0.002)
    assert rules.full_heads_cache(rules.SHAPES["llama-7b"]) == rules.state("llama-7b")
    assert rules.cookbook(rules.SHAPES["llama-7b"]) == pytest.approx(rules.parameters("llama-7b"), rel=0.002)


def test_a_cache_has_keys_and_values():
    shape = rules.SHAPES["llama-7b"]
    assert 2 * rules.cookbook_cache(shape) == rules.state("llama-7b")


@pytest.mark.parametrize("name", ["llama-3-8b", "mistral-7b", "qwen3-8b", "falcon-7b"])
def test_cache_has_only_kv_heads(name: str):
    """By 2 L H d grouped heads are forgotten: too large by query heads over KV heads, where heads fill the width."""
    shape = rules.SHAPES[name]
    assert rules.full_heads_cache(shape) / rules.state(name) == pytest.approx(shape.heads / shape.kv_heads)


def test_windowed_layers_stop_growing():
    """Every second layer of gpt-oss sees 128 tokens: an engine that counts it whole says twice as much."""
    config = gf.preset("gpt-oss-120b")
    whole = 2 * 36 * 8 * 64 * 2
    assert config.state_bytes(131_072, torch.bfloat16) / 131_072 == pytest.approx(whole / 2, rel=0.01)


def test_a_latent_is_not_a_cache_of_heads():
    assert rules.state("deepseek-v2-lite") == 2 * 27 * (512 + 64)


def test_tied_ends_count_once():
    assert rules.cookbook(rules.SHAPES["gpt2"]) > 1.3 * rules.parameters("gpt2")
    assert rules.parameters("gpt2") == 124_439_808


def test_a_token_meets_few_experts_and_training_pays_for_those():
    plan = gf.plan(gf.preset("mixtral-8x7b"))
    flops = plan.training_flops
    assert flops.training - flops.scores == pytest.approx(6 * plan.active_parameters, rel=0.02)
    assert plan.active_parameters < 0.28 * plan.parameters


def test_a_full_recomputation_keeps_the_input_of_a_layer():
    """2 d bytes a token and layer in 16 bits, not 34 d (Korthikanti et al. 2022, 2205.05198, section 5)."""
    kept = gf.preset("llama-7b").costs(Shape.training(1, 64, torch.bfloat16))["layers"]
    assert kept.activation_bytes("full") == 64 * 32 * 2 * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_trade_tokens(dtype: torch.dtype):
    """Activations of experts are not divided by their owners, since each computes the tokens of all. Weights are, with
    their copies by autocast and their gradients."""
    config = gf.preset("llama@1m+moe:4:2+vocab_size=512")
    experts = gf.plan(config).expert_parameters

    def difference(batch: int, context: int, zero: int, what: str) -> int:
        """Between all experts and a quarter of them."""
        plans = (
            gf.plan(config, train=True, batch=batch, context=context, dtype=dtype, layout=f"dp=4,zero={zero},ep={ep}")
            for ep in (1, 4)
        )
        whole, spread = (max(getattr(one, what) for one in plan.moments.values()) for plan in plans)
        return whole - spread

    casts = 2 if dtype == torch.bfloat16 else 0
    assert difference(8, 64, 1, "weights") == pytest.approx(4 * experts * 3 / 4)
    assert difference(8, 64, 1, "activations") == pytest.approx(casts * experts * 3 / 4, abs=1000)
    of_layer = dtype.itemsize * experts / config.n_layers  # few tokens: gradients are most of what it works with
    assert difference(4, 8, 3, "working") == pytest.approx(of_layer * 3 / 4, rel=0.01)


def test_stage_3_divides_the_rest_of_tensor_and_pipeline_cuts():
    """16 N / (tp pp dp) bytes of states, and not that over tp pp once more."""
    config = gf.preset("llama@1m+vocab_size=512+untied")
    memory = gf.plan(config, train=True, batch=8, context=64, layout="dp=2,tp=2,pp=2,zero=3,micro=2").moments["step"]
    states = memory.weights + memory.gradients + memory.optimizer
    assert states == pytest.approx(16 * config.num_params() / 8, rel=0.05)


def test_the_fullest_stage_is_planned():
    """Seven layers on two stages: four on one of them, not three and a half."""
    config = gf.preset("gpt2@1m+vocab_size=64+context=64+layers=7")
    layers = config.costs(Shape(s=1, t=1, phase="prefill"))["layers"].parameters
    weights = gf.plan(config, train=True, batch=2, context=64, layout="pp=2,micro=1").peak.weights
    assert weights >= 4 * layers * 4 / 7


def test_buckets_of_gradients_are_memory():
    """torch's DistributedDataParallel copies gradients into buckets, as large as all of them."""
    config = gf.preset("gpt2@1m")
    alone, copies = (gf.plan(config, train=True, batch=2, layout=how).peak for how in ("dp=1,micro=1", "dp=2"))
    assert copies.buffers == 4 * config.num_params() and alone.buffers == 0
    assert copies.total == pytest.approx(alone.total + copies.buffers, rel=0.15)


def test_logits_are_memory():
    """Eager torch holds them in 16 bits and three times in fp32: 14 bytes each; ours has a chunk of them."""
    config, tokens = gf.preset("gpt2@1m"), 8 * 256
    plans = (gf.plan(config, train=True, batch=8, context=256, loss=how) for how in ("chunked", "whole"))
    ours, whole = (plan.moments["loss"].loss for plan in plans)
    assert whole == 14 * tokens * config.vocab_size and ours < whole / 2


def test_masters_are_memory():
    """Weights in 16 bits with masters take 2 N + 4 N instead of 4 N (Narayanan et al. 2021, 18 N in all)."""
    config = gf.preset("llama@1m+vocab_size=512")
    memory = gf.plan(config, train=True, context=64, weights="bfloat16").moments["step"]
    states = memory.weights + memory.masters + memory.gradients + memory.optimizer
    assert states == 18 * config.num_params() and memory.masters == 4 * config.num_params()


def test_training_memory_exceeds_states():
    """Four times the fp32 weights leave out activations and logits, which grow with the batch."""
    small, large = (gf.plan(gf.preset("gpt2"), train=True, batch=batch).memory["total"] for batch in (1, 16))
    states = 16 * rules.parameters("gpt2")
    assert states < small and large > 2 * states


@pytest.mark.slow
def test_planning_page_equals_output_of_its_command():
    assert PAGE.read_text(encoding="utf-8") == written(), "run python -m experiments.plan.document"
