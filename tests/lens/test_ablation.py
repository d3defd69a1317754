"""Each head taken out by itself, against a loop over models whose output matrix was zeroed by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import glassformer as gf
from glassformer.introspection import sites
from glassformer.lens import passes
from glassformer.model import Model
from tests.refused import failed, refused

TINY = "layers=3+d_model=32+heads=4+vocab_size=31+context=64"
FAMILIES = ["gpt2@1m", "llama@1m+gqa:2", "bloom@1m", "falcon@1m", "llama@1m+window:3"]
TOKENS = (torch.arange(20).view(2, 10) * 7) % 31
each_family = pytest.mark.parametrize("expression", FAMILIES)


def tiny(expression: str) -> Model:
    return gf.preset(f"{expression}+{TINY}").build(seed=0).double().eval()


@torch.no_grad()
def loss_of(model: Model) -> float:
    return float(F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten()))


def last_logit(logits: Tensor) -> Tensor:
    """A number for each row."""
    return logits[:, -1, 5]


@torch.no_grad()
def by_hand(expression: str, measure: object) -> Tensor:
    """Returns the effects (layers, heads), each from a separate model whose head is removed."""
    whole = measure(tiny(expression))
    change = torch.zeros(3, 4, dtype=torch.float64)
    for layer in range(3):
        for head in range(4):
            model = tiny(expression)
            model.layers[layer].mixer.output.weight.view(32, 4, 8)[:, head] = 0
            change[layer, head] = measure(model) - whole
    return change


@each_family
def test_the_table_is_that_of_heads_zeroed_by_hand(expression: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny(expression)
    found = gf.lens.head_ablation(model, TOKENS)
    expected = by_hand(expression, loss_of)
    assert found.base == pytest.approx(loss_of(model)) and expected.abs().min() > 1e-8
    torch.testing.assert_close(found.change, expected, rtol=1e-9, atol=1e-12)
    monkeypatch.setattr(passes, "TOKENS_PER_PASS", 20 * 5)  # five copies of the text share a pass
    done: list[tuple[int, int]] = []
    again = gf.lens.head_ablation(model, TOKENS, progress=lambda *at: done.append(at))
    torch.testing.assert_close(again.change, found.change, rtol=1e-9, atol=1e-12)
    assert done == [(5, 13), (10, 13), (13, 13)]
    assert not any(site.watched for site in sites(model).values())


@each_family
def test_a_metric_in_place_of_the_loss(expression: str):
    def measure(model: Model) -> Tensor:
        return model(TOKENS)[:, -1, 5].mean()

    found = gf.lens.head_ablation(tiny(expression), TOKENS, last_logit)
    torch.testing.assert_close(found.change, by_hand(expression, measure), rtol=1e-9, atol=1e-12)
    one_number = gf.lens.head_ablation(tiny(expression), TOKENS, lambda logits: float(last_logit(logits).mean()))
    torch.testing.assert_close(one_number.change, found.change, rtol=1e-9, atol=1e-12)


def test_the_mean_is_that_of_the_head_over_all_tokens():
    model = tiny("llama@1m+gqa:2")
    found = gf.lens.head_ablation(model, TOKENS, last_logit, by="mean")
    z = gf.capture(model, TOKENS, "layers.1.mixer.z")["layers.1.mixer.z"]

    def level(module: object, args: tuple[Tensor]) -> tuple[Tensor]:
        x = args[0].clone()
        x[..., 16:24] = z[:, :, 2].mean((0, 1))
        return (x,)

    hook = model.layers[1].mixer.output.register_forward_pre_hook(level)
    with torch.no_grad():
        expected = float(last_logit(model(TOKENS)).mean()) - found.base
    hook.remove()
    assert found.change[1, 2] == pytest.approx(expected, rel=1e-9)


def test_ablation_table_allows_layers_without_heads():
    found = gf.lens.HeadAblation(torch.tensor([[0.1, -0.7], [math.nan, math.nan]]), 2.0, "loss", "zero")
    assert str(found).splitlines()[1:] == ["layer 0, head 1: -0.7000", "layer 0, head 0: +0.1000"]
    model = tiny("llama@1m")
    del model.layers[1].mixer.z
    model.layers[1].mixer.z = lambda z: z
    mixed = gf.lens.head_ablation(model, TOKENS)
    assert mixed.change[1].isnan().all() and not mixed.change[[0, 2]].isnan().any()


def test_the_model_is_ablated_at_rest_and_left_as_it_was():
    model = tiny("llama@1m+residual.dropout=0.5").train()
    found = gf.lens.head_ablation(model, TOKENS)
    assert model.training and model.layers[0].training
    torch.testing.assert_close(found.change, gf.lens.head_ablation(model.eval(), TOKENS).change)


def test_ablation_has_summary_and_figure():
    found = gf.lens.head_ablation(tiny("llama@1m"), TOKENS)
    layer, head = divmod(int(found.change.abs().argmax()), 4)
    assert str(found).splitlines()[1].startswith(f"layer {layer}, head {head}: ")
    assert "loss 3." in str(found) and found.to_dict()["change"] == found.change.tolist()
    ax = found.figure().axes[0]
    torch.testing.assert_close(torch.tensor(ax.images[0].get_array().data), found.change.float())
    assert "<img" in found._repr_html_()


def test_a_broken_model_is_not_measured():
    model = tiny("llama@1m")
    with torch.no_grad():
        model.layers[1].mixer.qkv.weight.fill_(math.nan)
    with failed(code="diverged"):
        gf.lens.head_ablation(model, TOKENS)
    with failed(code="diverged"):
        gf.lens.head_ablation(model, TOKENS, last_logit)


@pytest.mark.parametrize(
    ("given", "code", "field"),
    [
        ({"metric": lambda logits: logits[:, -1]}, "range", "metric"),
        ({"metric": lambda logits: None}, "type", "metric"),
        ({"by": "median"}, "unknown", "by"),
        ({"tokens": TOKENS[:, :1]}, "range", "tokens"),
        ({"tokens": TOKENS + 31}, "range", "tokens"),
        ({"tokens": TOKENS.float()}, "type", "tokens"),
        ({"tokens": TOKENS[None]}, "range", "tokens"),
    ],
)
def test_wrong_requests_are_one_sentence(given: dict[str, object], code: str, field: str):
    with refused(code=code, field=field) as caught:
        gf.lens.head_ablation(tiny("llama@1m"), **{"tokens": TOKENS, **given})
    assert "\n" not in str(caught.value)
