"""Real vectors as a sequence, and layers without norms."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import glassformer as gf
from glassformer.parts.core.cost import Shape
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.forward_pass import Pass
from glassformer.parts.norm import Identity
from glassformer.parts.patches import PatchesConfig
from glassformer.parts.vectors import Vectors, VectorsConfig
from tests.refused import refused

SMALL = "gpt2@1m+layers=2+d_model=16+heads=2+vocab_size=61+context=12"
X = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0))


def test_vectors_are_an_affine_map() -> None:
    part = Vectors(16, 5)
    with torch.no_grad():
        part.projection.bias.normal_()  # type: ignore[union-attr]
    torch.testing.assert_close(part(X), X @ part.projection.weight.T + part.projection.bias)
    assert Vectors(16, 5, bias=False).projection.bias is None


def test_vector_embedding_starts_with_unit_variance() -> None:
    config = gf.preset("gpt2@1m+d_model=256+vectors:9")
    weight = config.build(seed=0).embedding.vectors.projection.weight.detach()  # type: ignore[union-attr]
    assert weight.std() == pytest.approx(1 / 3, rel=0.05) and weight.abs().max() <= math.sqrt(3) / 3
    assert torch.equal(weight, config.build(seed=0).embedding.vectors.projection.weight)  # type: ignore[union-attr]
    assert config.initial_weights(0).piece("embedding.vectors.projection.weight").equal(weight)


def test_a_model_of_vectors_counts_itself_and_learns() -> None:
    config = gf.preset(f"{SMALL}+vectors:5+kernel=naive")
    model = config.build(seed=0)
    assert config.num_params() == sum(weight.numel() for weight in model.parameters())
    with FlopCounterMode(display=False) as counter:
        found = model(X)
    assert found.shape == (3, 7, 1)
    assert counter.get_total_flops() == config.costs(Shape(b=3, s=7, t=7, phase="prefill")).flops
    found.square().sum().backward()
    idle = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not idle


def test_vector_model_is_causal_and_its_state_continues() -> None:
    model = gf.preset(f"{SMALL}+vectors:5").build(seed=0).eval()
    with torch.no_grad():
        whole, state = model(X), model.init_state(3, 12)
        torch.testing.assert_close(model(X[:, :4]), whole[:, :4])
        pieces = torch.cat([model(X[:, :4], state), model(X[:, 4:], state)], 1)
    torch.testing.assert_close(pieces, whole)


def test_its_sites_and_its_file(tmp_path: Path) -> None:
    config = gf.preset(f"{SMALL}+vectors:5")
    seen = gf.capture(config.build(seed=0), X, ["embed", "layers.1.mixer.pattern"])
    assert seen["embed"].shape == (3, 7, 16) and seen["layers.1.mixer.pattern"].shape == (3, 2, 7, 7)
    config.save(tmp_path / "model.yaml")
    assert gf.preset(str(tmp_path / "model.yaml")) == config


def test_vector_model_refuses_other_inputs() -> None:
    model = gf.preset(f"{SMALL}+vectors:5").build(seed=0)
    for given in (X[..., :4], X[0], X.long()):
        with refused(code="conflict", field="vectors"):
            model.hidden_states(given)
    with refused(code="conflict", field="embedding.vectors"):
        model.embedding.applied()
    with refused(code="conflict", field="head"):
        gf.preset(f"{SMALL}+vectors:5+head.classes=null")
    with refused(code="conflict", field="vectors"):
        EmbeddingConfig(vectors=VectorsConfig(size=5), patches=PatchesConfig())


def test_layer_without_norms_adds_only_its_branches() -> None:
    config = gf.preset(f"{SMALL}+nonorm")
    assert config.num_params() == gf.preset(SMALL).num_params() - 5 * 2 * 16  # five layer norms
    model, x = config.build(seed=0).double(), torch.randn(2, 6, 16, dtype=torch.float64)
    assert isinstance(model.final_norm, Identity)
    layer = model.layers[0]
    mixed = x + layer.mixer(x)
    torch.testing.assert_close(layer(x, Pass.of(x)), mixed + layer.ffn(mixed))
    held, constant = Identity().held(x[0, 0], x[0, 1])
    assert torch.equal(held, x[0, 1]) and constant == 0


def test_sinusoidal_positions_bring_the_published_scale() -> None:
    """Vaswani et al. 2017, 3.4: embeddings times sqrt(d_model). A scale that is set stays, and other positions come
    without one."""

    def scale(expression: str) -> float | None:
        return gf.preset(expression).embedding.scale

    assert scale("gpt2@1m+sinusoidal") == math.sqrt(128)
    assert scale("gpt2@1m+sinusoidal+d_model=64+heads=2") == 8
    assert scale("gpt2@1m+sinusoidal+embedding.scale=1") == 1
    assert scale("gpt2@1m+embedding.scale=3+sinusoidal") == 3
    assert gf.preset("gpt2@1m+sinusoidal+rope") == gf.preset("gpt2@1m+rope")
    assert gf.preset("gemma-2-2b@1m+sinusoidal+rope") == gf.preset("gemma-2-2b@1m+rope")
    assert scale("transformer@1m+sinusoidal") == scale("transformer@1m") == math.sqrt(128)
    pegasus = gf.preset("transformer@1m+embedding.scale=null")  # sinusoidal before any change: as it is
    assert pegasus.embedding.scale is None
