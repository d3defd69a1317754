"""Sinks and massive activations, against loops, closed forms, and values planted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer.dynamics import sink_mass
from glassformer.lens import sinks
from glassformer.lens.sinks import MassiveActivation
from glassformer.model import Model
from glassformer.parts.core.site import Site
from glassformer.parts.kernel import naive
from glassformer.parts.visibility import SlidingWindow
from tests.refused import failed

TINY = "layers=3+d_model=32+heads=4+vocab_size=31+context=64"
FAMILIES = ["gpt2@1m", "llama@1m+gqa:2", "bloom@1m", "falcon@1m", "llama@1m+window:3"]
TOKENS = (torch.arange(24).view(2, 12) * 7) % 31


def tiny(expression: str) -> Model:
    return gf.preset(f"{expression}+{TINY}").build(seed=0).eval()


@pytest.mark.parametrize("expression", FAMILIES)
def test_the_mass_is_the_mean_over_all_queries(expression: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny(expression)
    maps = gf.capture(model, TOKENS, "layers.*.mixer.pattern")
    monkeypatch.setattr(naive, "VALUES_PER_BLOCK", 5 * 2 * 4 * 12)
    found = gf.lens.attention_sinks(model, TOKENS)
    for layer in range(3):
        a = maps[f"layers.{layer}.mixer.pattern"]
        for head in range(4):
            by_hand = sum(float(a[row, head, i, 0]) for row in range(2) for i in range(12)) / 24
            assert float(found.mass[layer, head]) == pytest.approx(by_hand, rel=1e-5)
        torch.testing.assert_close(found.mass[layer].float(), sink_mass(a))


def test_uniform_head_has_harmonic_mean_sink_mass():
    model = tiny("llama@1m")
    with gf.edit(model, gf.lens.replace("layers.*.mixer.q", 0.0)):
        found = gf.lens.attention_sinks(model, TOKENS)
    harmonic = sum(1 / i for i in range(1, 13)) / 12
    assert found.uniform.tolist() == pytest.approx([harmonic] * 3) and found.rate == 0
    torch.testing.assert_close(found.mass, torch.full((3, 4), harmonic, dtype=torch.float64))


@pytest.mark.parametrize(
    ("expression", "seen"),
    [
        ("gpt2@1m+bidirectional", [12] * 12),
        ("llama@1m+window:3", [1, 2, 3, *[0] * 9]),
        ("llama@1m", list(range(1, 13))),
    ],
)
def test_all_alike_is_among_the_keys_that_are_seen(expression: str, seen: list[int]):
    """`seen`: how many keys each query sees, 0 where the first token is not among them."""
    model = tiny(expression)
    with torch.no_grad():
        for layer in model.layers:
            layer.mixer.qkv.weight[:32] = 0  # queries, so that every score is 0
    found = gf.lens.attention_sinks(model, TOKENS)
    expected = sum(1 / keys for keys in seen if keys) / 12
    torch.testing.assert_close(found.mass, torch.full((3, 4), expected, dtype=torch.float64))
    assert found.uniform.tolist() == pytest.approx([expected] * 3)
    assert f"(all alike: {expected:.2f})" in str(found) and found.to_dict()["uniform"] == found.uniform.tolist()


def test_uniform_mass_differs_by_visibility(monkeypatch: pytest.MonkeyPatch):
    model = tiny("llama@1m")
    model.layers[1].mixer.visibility = SlidingWindow(3)
    del model.layers[2].mixer.pattern
    model.layers[2].mixer.__dict__["pattern"] = Site("bnst")  # no child of the mixer, and so no site of the model
    monkeypatch.setattr(sinks, "QUERIES", 5)
    found = gf.lens.attention_sinks(model, TOKENS)
    assert "(all alike: 0.26 or 0.15)" in str(found) and found.uniform[2].isnan()


def test_the_sink_rate_is_the_share_of_heads_above_three_tenths():
    model = tiny("llama@1m")

    def sinking(pattern: Tensor) -> Tensor:
        """Makes head 0 give the first token all weight, head 1 0.35 and head 2 0.2, except in the first query."""
        pattern.zero_()
        for head, mass in enumerate((1.0, 0.35, 0.2, 0.0)):
            pattern[:, head].diagonal(dim1=1, dim2=2).fill_(1 - mass)
            pattern[:, head, :, 0] += mass
        return pattern

    with gf.edit(model, {"layers.1.mixer.pattern": sinking}, gf.lens.replace("layers.[02].mixer.q", 0.0)):
        found = gf.lens.attention_sinks(model, TOKENS)
    torch.testing.assert_close(
        found.mass[1], torch.tensor([1.0, (11 * 0.35 + 1) / 12, (11 * 0.2 + 1) / 12, 1 / 12]).double()
    )
    assert found.rate == 2 / 12
    assert str(found).startswith("sink rate 17%: heads with more than 0.3 of their attention on the first of 12 tokens")
    assert "strongest: layer 1 head 0 1.00" in str(found) and found.to_dict()["rate"] == 2 / 12
    assert "17%" in found.figure().axes[0].get_title(loc="left")


# Massive activations


def planted(position: int, dimension: int, value: float, row: int = 0) -> dict[str, object]:
    """A stream of +-0.1 after layer 1, with one value that is not."""

    def plant(x: Tensor) -> Tensor:
        x = torch.where(torch.rand(x.shape) < 0.5, 0.1, -0.1)
        x[row, position, dimension] = value
        return x

    return {"layers.1.resid_post": plant}


@pytest.mark.parametrize(
    ("value", "massive"), [(150.0, True), (-150.0, True), (100.1, True), (99.9, False), (-99.9, False)]
)
def test_above_one_hundred_and_a_thousand_medians(value: float, massive: bool):
    model = tiny("llama@1m")
    with gf.edit(model, planted(5, 7, value, row=1), {"layers.2.resid_post": torch.zeros_like}):
        found = gf.lens.massive_activations(model, TOKENS)
    one = MassiveActivation(2, 1, 5, 7, pytest.approx(value), pytest.approx(abs(value) / 0.1))
    assert found.found == ([one] if massive else [])
    assert float(found.largest[2, 0]) == pytest.approx((abs(value) + 0.1) / 2) and found.largest.shape == (4, 3)
    assert float(found.median[2]) == pytest.approx(0.1)


def test_massive_activation_exceeds_1000_medians_of_the_same_row():
    """200 in a stream of 0.3 is not massive, however small another row is."""
    model = tiny("llama@1m")

    def stream(x: Tensor) -> Tensor:
        x = torch.stack([torch.full_like(x[0], 0.3), torch.full_like(x[0], 0.01)])
        x[:, 0, 0] = 200
        return x

    with gf.edit(model, {"embed": stream}):
        found = gf.lens.massive_activations(model, TOKENS)
    assert [(one.depth, one.row) for one in found.found if one.depth == 0] == [(0, 1)]


def test_untrained_model_has_no_massive_activations():
    found = gf.lens.massive_activations(tiny("gpt2@1m"), TOKENS)
    assert not found.found and str(found).startswith("no massive activation (above 100 and 1,000 times the median")
    x = gf.capture(tiny("gpt2@1m"), TOKENS, "layers.1.resid_post")["layers.1.resid_post"].double().abs().flatten(1)
    torch.testing.assert_close(found.largest[2], x.sort(1, descending=True).values[:, :3].mean(0))
    torch.testing.assert_close(found.median[2], x.sort(1).values[:, 12 * 32 // 2 - 1].mean())


def test_massive_activations_have_summary_and_figure():
    model = tiny("llama@1m")
    with gf.edit(model, planted(0, 7, 500.0)):
        found = gf.lens.massive_activations(model, TOKENS)
    assert "massive activations at depths 2" in str(found) and "dimensions 7 of tokens 0" in str(found)
    first = found.to_dict()["found"][0]
    assert (first["position"], first["dimension"]) == (0, 7) and first["value"] > 400
    ax = found.figure().axes[0]
    assert "dimensions 7" in ax.get_title(loc="left")
    assert list(ax.lines[0].get_ydata()) == found.largest[:, 0].tolist()


def test_a_broken_model_is_not_called_healthy():
    model = tiny("llama@1m")
    with torch.no_grad():
        model.layers[1].mixer.qkv.weight.fill_(float("nan"))
    for reading in (gf.lens.attention_sinks, gf.lens.massive_activations):
        with failed(code="diverged"):
            reading(model, torch.arange(6))
