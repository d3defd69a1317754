"""Readings of models whose layers are recurrences, some or all of them."""

from __future__ import annotations

import pytest
import torch

import glassformer as gf
from glassformer import lens
from glassformer.config import Stage
from glassformer.dynamics.probe import probe
from glassformer.dynamics.weights import named_matrices
from glassformer.introspection import capture
from glassformer.model import Model
from tests.refused import refused

SIZE = "layers=2+d_model=32+heads=4+vocab_size=61+context=64"
TOKENS = torch.randint(61, (1, 20), generator=torch.Generator().manual_seed(0))


def hybrid(*layers: str) -> Model:
    """A layer for each change."""
    blocks = tuple(gf.preset(f"llama@1m+{SIZE}+{change}").stack[0].blocks[0] for change in layers)
    return gf.preset(f"llama@1m+{SIZE}").replace(stack=(Stage(blocks=blocks),)).build(seed=0).eval()


def test_the_map_of_a_channel_is_its_effective_attention():
    model, site = hybrid("causal", "mamba"), "layers.1.mixer.effective_attention"
    wanted = capture(model, TOKENS, site)[site][0, 5].abs()
    found = lens.attention_map(model, TOKENS, layer=-1, head=5)
    assert (found.layer, found.head, found.tile) == (1, 5, 1)
    torch.testing.assert_close(found.weights, wanted / wanted.max())
    assert str(found).startswith(f"layer 1, channel 5, over {wanted.max():.3g}: effective attention of 20 tokens")
    pooled = lens.attention_map(model, TOKENS, layer=1, head=-1, pool=4)
    assert pooled.weights.shape == (4, 4) and pooled.tile == 5 and pooled.head == 63
    with refused(code="range", field="head"):
        lens.attention_map(model, TOKENS, layer=1, head=64)
    assert found.figure() is not None


def test_readings_of_a_hybrid_cover_layers_with_heads():
    model = hybrid("mamba", "causal")
    assert lens.attention_maps(model, TOKENS).layers == [1]
    table = lens.head_ablation(model, TOKENS).change
    assert table[0].isnan().all() and table[1].isfinite().all()
    seen = lens.inspect(model, TOKENS)
    assert list(seen.attention) == [1] and {head.layer for head in seen.heads} == {1}
    assert "<html" in seen.html()
    statistics = probe(model, TOKENS)
    assert list(statistics["attention_entropy"]) == ["layers.1.mixer"]
    assert {"layers.0.mixer.u", "layers.0.mixer.dt", "layers.0.mixer.out"} <= named_matrices(model).keys()


@pytest.mark.parametrize("layers", [("mamba", "causal"), ("mamba+bias", "mamba"), ("causal", "mamba+post")])
def test_logit_is_the_sum_of_contributions(layers: tuple[str, ...]):
    found = lens.logit_attribution(hybrid(*layers), TOKENS)
    assert abs(found.total - found.logit) < 1e-4
    assert found.heads.any(dim=1).all()


@pytest.mark.parametrize(
    ("reading", "field"),
    [(lens.attention_maps, "model"), (lens.attention_rollout, "layer"), (lens.attention_sinks, "model"),
     (lens.head_scores, "model")],
)  # fmt: skip
def test_softmax_readings_refuse_recurrent_models(reading, field: str):
    """Effective attention is signed and its rows do not sum to one, so it is not a pattern."""
    model = hybrid("mamba", "mamba")
    with refused(code="unsupported", field=field):
        reading(model, TOKENS) if reading is not lens.head_scores else reading(model)
    assert "<html" in lens.inspect(model, TOKENS).html()


def test_a_recurrence_has_no_mask_to_take_away():
    model = gf.preset("mamba@1m+layers=1+d_model=32+vocab_size=31").build(seed=0)
    with refused(code="unsupported", field="layer"):
        lens.side_by_side(model, torch.arange(5), layer=0, head=0)
