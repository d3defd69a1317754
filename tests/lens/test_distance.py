"""Mean distances of attention, against loops over whole maps, closed forms, and maps that were made for them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer.lens import inspect
from glassformer.model import Model
from glassformer.parts.kernel import naive
from tests.refused import refused

TINY = "layers=3+d_model=32+heads=4+vocab_size=31+context=64"
FAMILIES = ["gpt2@1m", "llama@1m+gqa:2", "bloom@1m", "llama@1m+window:3", "gpt2@1m+bidirectional"]
TOKENS = (torch.arange(24).view(2, 12) * 7) % 31


def tiny(expression: str) -> Model:
    return gf.preset(f"{expression}+{TINY}").build(seed=0).eval()


@pytest.mark.parametrize("expression", FAMILIES)
def test_distances_are_means_over_the_whole_map(expression: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny(expression)
    maps = gf.capture(model, TOKENS, "layers.*.mixer.pattern")
    monkeypatch.setattr(naive, "VALUES_PER_BLOCK", 5 * 2 * 4 * 12)
    found = gf.lens.attention_distance(model, TOKENS)
    for layer in range(3):
        a = maps[f"layers.{layer}.mixer.pattern"].double()
        for head in range(4):
            cells = [(i, j, float(a[row, head, i, j])) for row in range(2) for i in range(12) for j in range(12)]
            whole = sum(w * abs(i - j) for i, j, w in cells) / sum(w for *_, w in cells)
            later = [cell for cell in cells if cell[1]]
            apart = sum(w * abs(i - j) for i, j, w in later) / sum(w for *_, w in later)
            assert float(found.distance[layer, head]) == pytest.approx(whole, rel=1e-6)
            assert float(found.apart[layer, head]) == pytest.approx(apart, rel=1e-6)


@pytest.mark.parametrize(
    ("expression", "mean"),
    [
        ("llama@1m", sum(i / 2 for i in range(12)) / 12),
        ("llama@1m+window:3", (0 + 0.5 + 10 * 1) / 12),
        ("gpt2@1m+bidirectional", sum(abs(i - j) for i in range(12) for j in range(12)) / 144),
    ],
)
def test_uniform_attention_has_the_distance_of_the_closed_form(expression: str, mean: float):
    model = tiny(expression)
    with gf.edit(model, gf.lens.replace("layers.*.mixer.q", 0.0)):
        found = gf.lens.attention_distance(model, TOKENS)
    assert found.uniform.tolist() == pytest.approx([mean] * 3)
    torch.testing.assert_close(found.distance, torch.full((3, 4), mean, dtype=torch.float64), rtol=1e-5, atol=0)


@pytest.mark.parametrize("back", [0, 1, 4])
def test_a_head_that_reads_one_place_has_its_distance(back: int):
    """Head 2 of layer 1 reads `back` tokens back, or the first token; the others read themselves."""
    model = tiny("gpt2@1m")

    def look(pattern: Tensor) -> Tensor:
        made = torch.eye(12).expand_as(pattern).clone()
        made[:, 2] = torch.nn.functional.one_hot((torch.arange(12) - back).clamp(min=0), 12).float()
        return made

    with gf.edit(model, {"layers.1.mixer.pattern": look}):
        found = gf.lens.attention_distance(model, TOKENS)
    assert found.apart[1].tolist() == pytest.approx([0, 0, back, 0])
    whole = sum(min(back, i) for i in range(12)) / 12
    assert float(found.distance[1, 2]) == pytest.approx(whole)
    assert float(found.by_layer[1]) == pytest.approx(back / 4)
    if back:
        assert f"farthest: layer 1 head 2 {back:.1f}" in str(found) or found.apart.argmax() != 6


def test_a_layer_without_heads_has_no_distance():
    model = gf.preset(f"llama@1m+{TINY}+stack:mamba,attention").build(seed=0)
    found = gf.lens.attention_distance(model, TOKENS)
    assert found.distance[0].isnan().all() and found.uniform[0].isnan() and found.distance[1].isfinite().all()
    assert found.to_dict()["by_layer"][0] is None and found.figure() is not None
    with refused(code="unsupported", field="model"):
        gf.lens.attention_distance(gf.preset(f"llama@1m+{TINY}+mamba").build(seed=0), TOKENS)


@pytest.mark.parametrize("expression", FAMILIES)
def test_the_page_has_the_same_distances(expression: str):
    model = tiny(expression)
    seen = inspect(model, TOKENS[0])
    mine = torch.tensor([head.distance for head in seen.heads]).view(3, 4)
    found = gf.lens.attention_distance(model, TOKENS[:1])
    torch.testing.assert_close(mine, found.distance.float(), rtol=1e-5, atol=1e-6)
    assert all(math.isfinite(head["distance"]) for head in seen.to_dict()["heads"])
