"""Initial weights by role, those of tables, heads and stacked matrices among them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from glassformer.config import ModelConfig, Stage
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.core.init import Init, by_role
from glassformer.parts.embedding import Embedding
from glassformer.parts.head import Head
from glassformer.parts.linear import Linear
from glassformer.parts.position import Learned

LAYERS, D = 8, 64
SIZE = f"layers={LAYERS}+d_model={D}+heads=4+vocab_size=500+context=200"


def matrices(model: Model) -> list[tuple[str, Tensor]]:
    """(role, weight) of every matrix, stacked ones apart."""
    found = []
    for module in model.modules():
        if isinstance(module, Linear):
            found += zip(module.roles, module.weight.split(module.outs), strict=True)
        elif isinstance(module, (Embedding, Learned)):
            found.append(("embedding", module.weight))
        elif isinstance(module, Head) and module.weight is not None:
            found.append(("head", module.weight))
    return found


def built(init: str) -> tuple[ModelConfig, Model]:
    config = preset(f"gpt2@1m+untied+gqa:2+swiglu+{SIZE}+{init}")
    return config, config.build(seed=0)


def has_std(weights: list[Tensor], std: float) -> bool:
    """Within three standard errors of the rule, std / sqrt(2 n), for a sample of n."""
    values = torch.cat([weight.detach().flatten() for weight in weights])
    n = len(values)
    return abs(values.std().item() - std) <= 3 * std / math.sqrt(2 * n) and abs(
        values.mean().item()
    ) <= 4 * std / math.sqrt(n)


REST = ("score", "hidden", "embedding", "head")
RULES = {
    "init=gpt2": {**dict.fromkeys(REST, 0.02), "output": 0.02 / math.sqrt(2 * LAYERS)},
    "init=gpt2+init.depth_scaled=false": dict.fromkeys((*REST, "output"), 0.02),
    "init=gpt2+init.std=0.1": {**dict.fromkeys(REST, 0.1), "output": 0.1 / math.sqrt(2 * LAYERS)},
    "init=small": {
        **dict.fromkeys(REST, math.sqrt(2 / (5 * D))),
        "output": 2 / (LAYERS * math.sqrt(D)),
    },
}


@pytest.mark.parametrize("init", RULES)
def test_normal_rules(init: str):
    _, model = built(init)
    found = matrices(model)
    assert {role for role, _ in found} == {*REST, "output"}
    for role, std in RULES[init].items():
        assert has_std([weight for name, weight in found if name == role], std), role
        first = next(weight for name, weight in found if name == role)
        assert first.abs().max() > 2.5 * std  # normal, not uniform


@pytest.mark.parametrize("init", ["init=xavier", "init=xavier+init.gain=2", "init=xavier+init.uniform=false"])
def test_xavier_fills_each_matrix_by_its_own_fans(init: str):
    """Stacked matrices too: q, k and v are initialised as separate matrices."""
    _, model = built(init)
    gain = 2.0 if "gain" in init else 1.0
    for role, weight in matrices(model):
        fan_out, fan_in = weight.shape
        std = gain * math.sqrt(2 / (fan_in + fan_out))
        assert has_std([weight], std), role
        bound = math.sqrt(3) * std
        if "uniform" in init:
            assert weight.abs().max() > bound
        else:
            assert 0.98 * bound < weight.abs().max() <= bound


def test_deepnorm_shrinks_value_output_and_ffn_matrices():
    """Xavier everywhere; W_V, W_O and the ffn times (8 L)^(-1/4)."""
    _, model = built("deepnorm")
    beta = (8 * LAYERS) ** -0.25
    for role, weight in matrices(model):
        fan_out, fan_in = weight.shape
        gain = beta if role in ("hidden", "output") else 1.0
        assert has_std([weight], gain * math.sqrt(2 / (fan_in + fan_out))), role
    qkv = model.layers[0].mixer.qkv
    assert qkv.roles == ("score", "score", "hidden")
    assert {module.roles for module in model.layers[0].ffn.children() if isinstance(module, Linear)} == {
        ("hidden",),
        ("output",),
    }


def test_gains_start_at_one_and_biases_at_zero():
    for expression in ("gpt2@1m", "llama@1m", "bloom@1m", "gpt2@1m+qknorm+head.bias=true"):
        model = preset(f"{expression}+{SIZE}").build(seed=0)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                assert (parameter == (0 if name.endswith("bias") else 1)).all(), name


def test_parts_without_config_are_initialised():
    """In a notebook, without a config: weights are drawn from torch's generator."""
    torch.manual_seed(0)
    linear, embedding, head = Linear(32, (32, 16), bias=True), Embedding(40, 32), Head(40, 32)
    for weight in (*linear.weight.split(linear.outs), embedding.weight, head.weight):
        assert weight.isfinite().all() and weight.std() > 0  # type: ignore[union-attr]
    assert (linear.bias == 0).all()
    torch.manual_seed(0)
    assert torch.equal(Linear(32, (32, 16)).weight, linear.weight)


def test_the_seed_is_the_only_source():
    before = torch.get_rng_state()
    a, b = torch.empty(4, 4), torch.empty(4, 4)
    Init(by_role(1.0, 1.0), seed=5).fill(a, "hidden")
    Init(by_role(1.0, 1.0), seed=5).fill(b, "hidden")
    assert torch.equal(a, b) and torch.equal(torch.get_rng_state(), before)


def test_layers_have_different_initial_weights():
    _, model = built("init=gpt2")
    weights = [layer.mixer.qkv.weight for layer in model.layers]
    assert len({weight.sum().item() for weight in weights}) == LAYERS


def test_meta_weights_stay_on_meta():
    with torch.device("meta"):
        assert Linear(4, 4).weight.is_meta


DEPTH = ("init=gpt2", "init=small", "init=deepnorm", "residual=deepnorm", "residual.depth_scaled=true")


@pytest.mark.parametrize("change", DEPTH)
def test_depth_factors_count_residual_additions(change: str):
    """12 additions: 6 layers of two, and 4 of three in 8 blocks (a decoder's: self, cross, ffn)."""
    config = preset(f"gpt2@1m+layers=6+d_model=64+heads=4+vocab_size=61+context=32+{change}")
    (block,) = config.stack[0].blocks
    alone = block.replace(ffn=None)
    split = config.replace(stack=(Stage(repeat=4, blocks=(alone, block)),))
    assert config.n_branches == split.n_branches == 12 and split.n_layers == 8

    def factors(config: ModelConfig) -> list[float]:
        ctx, wiring = config.ctx, config.stack[0].blocks[0].residual
        std = [config.init.build(ctx).std(role, 64.0, 64.0) for role in ("score", "hidden", "output")]
        return [*std, *wiring.numbers(ctx).values()]

    assert factors(split) == factors(config) != factors(config.replace(stack=(Stage(blocks=(block,)),)))


def test_stack_without_ffn_scales_output_init_by_branches():
    """Mamba: output weights at 0.02 / sqrt(2 L) of L layers."""
    config = preset("mamba@1m+layers=6+vocab_size=61+context=32")
    assert config.n_branches == 12
    assert config.init.build(config.ctx).std("output", 64.0, 64.0) == 0.02 / 12**0.5
