"""The routing of tokens to experts, against loops over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer.config import ModelConfig
from glassformer.model import Model
from tests.refused import refused

TINY = "layers=3+d_model=32+heads=4+vocab_size=31+context=64"
TOKENS = (torch.arange(26).view(2, 13) * 7) % 31
SOFT = "llama@1m+moe:4:2"
SIGMOID = "gpt2@1m+moe:5:3+ffn.score=sigmoid+ffn.balance_rate=0.1+ffn.scale=2.5"


def tiny(expression: str) -> Model:
    model = gf.preset(f"{expression}+{TINY}").build(seed=0).eval()
    for layer in model.layers:
        layer.ffn.router.weight.data *= 30
        if layer.ffn.router.selection_bias is not None:
            layer.ffn.router.selection_bias.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    return model


def by_hand(logits: Tensor, model: Model, layer: int) -> tuple[Tensor, dict[int, float]]:
    """p over its sum, and expert -> weight, of one token."""
    router = model.layers[layer].ffn.router
    soft = router.selection_bias is None
    p = logits.softmax(0) if soft else logits.sigmoid()
    rank = p if soft else p + router.selection_bias
    best = sorted(range(len(p)), key=lambda i: -float(rank[i]))[: 2 if soft else 3]
    total = sum(float(p[i]) for i in best)
    return p / p.sum(), {i: (1.0 if soft else 2.5) * float(p[i]) / total for i in best}


@pytest.mark.parametrize("expression", [SOFT, SIGMOID])
def test_loads_entropies_and_weights(expression: str):
    model = tiny(expression)
    found = gf.lens.expert_routing(model, TOKENS, layer=1)
    e = found.load.shape[1]
    for layer in range(3):
        inputs: list[Tensor] = []
        hook = model.layers[layer].ffn.router.register_forward_hook(lambda m, given, out, kept=inputs: kept.append(out))
        model(TOKENS)
        hook.remove()
        counts, entropy, rows = [0] * e, 0.0, inputs[0].flatten(0, 1)
        for at, logits in enumerate(rows):
            p, weights = by_hand(logits.detach(), model, layer)
            entropy += float(-(p * p.log()).sum()) / math.log(e) / len(rows)
            for expert in weights:
                counts[expert] += 1
            if layer == 1 and at < 13:
                expected = [weights.get(i, 0.0) for i in range(e)]
                torch.testing.assert_close(found.weights[at].tolist(), expected, rtol=1e-5, atol=1e-6)
        total = sum(counts)
        assert found.load[layer].tolist() == pytest.approx([count / total for count in counts])
        assert float(found.violation[layer]) == pytest.approx(max(counts) * e / total - 1, abs=1e-6)
        assert float(found.entropy[layer]) == pytest.approx(entropy, abs=1e-5)


def test_favourites_are_the_tokens_that_count_most():
    found = gf.lens.expert_routing(tiny(SOFT), TOKENS[0], layer=0)
    for expert in range(4):
        mine = {word: float(found.weights[at, expert]) for at, word in enumerate(found.words)}
        named = found.favourites(expert)
        assert set(named) == {word for word, weight in mine.items() if weight > 0}
        assert named == sorted(named, key=lambda word: -mine[word])
    assert str(found).count("layer 0, expert") == 4 and "MaxVio" in str(found)


def test_layers_without_experts_are_left_out():
    dense, routed = (gf.preset(f"{name}+{TINY}").stack[0].blocks[0] for name in ("llama@1m", SOFT))
    tree = gf.preset(f"llama@1m+{TINY}").to_dict() | {"stack": [{"blocks": [dense, routed]}]}
    model = ModelConfig.from_dict(tree).build(seed=0)
    found = gf.lens.expert_routing(model, TOKENS)
    assert found.layer == 1 and found.load[0].isnan().all() and found.violation[0].isnan()
    assert found.load[1].sum() == pytest.approx(1.0) and "in 1 layers" in str(found)
    assert model.training  # as it was
    with refused(code="unsupported", field="layer"):
        gf.lens.expert_routing(model, TOKENS, layer=0)


def test_an_ablated_expert_has_no_load():
    model = tiny(SOFT)
    with gf.edit(model, gf.lens.ablate_experts(1, [0, 2])):
        found = gf.lens.expert_routing(model, TOKENS, layer=1)
    assert found.load[1].tolist() == [0.0, 0.5, 0.0, 0.5] and found.load[0].min() > 0
    assert (found.weights[:, [0, 2]] == 0).all()


def test_it_is_drawn():
    found = gf.lens.expert_routing(tiny(SOFT), TOKENS[0])
    left, right = found.figure().axes[:2]
    assert left.images[0].get_array().shape == (3, 4) and right.images[0].get_array().shape == (13, 4)


def test_a_model_without_experts_is_refused():
    with refused(code="unsupported", field="model"):
        gf.lens.expert_routing(gf.preset(f"llama@1m+{TINY}").build(), TOKENS)
