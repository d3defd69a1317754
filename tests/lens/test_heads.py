"""Scores of heads, against maps that were made for them, a model built by hand, and plain loops over whole maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer.introspection import sites
from glassformer.lens.heads import KINDS, repeated_tokens
from glassformer.model import Model
from glassformer.parts.core.site import Site
from glassformer.parts.kernel import naive
from tests.refused import failed, refused

TINY = "layers=3+d_model=32+heads=4+vocab_size=31+context=64"
FAMILIES = ["gpt2@1m", "llama@1m+gqa:2", "bloom@1m", "falcon@1m", "llama@1m+window:3"]


def tiny(expression: str) -> Model:
    return gf.preset(f"{expression}+{TINY}").build(seed=0).eval()


@pytest.mark.parametrize("expression", FAMILIES)
@pytest.mark.parametrize("blocks", [1 << 24, 7 * 3 * 4 * 18])
def test_scores_are_means_over_the_whole_map(expression: str, blocks: int, monkeypatch: pytest.MonkeyPatch):
    model, length, batch = tiny(expression), 9, 3
    tokens = repeated_tokens(31, length, batch, seed=5)
    maps = gf.capture(model, tokens, "layers.*.mixer.pattern")
    monkeypatch.setattr(naive, "VALUES_PER_BLOCK", blocks)
    found = gf.lens.head_scores(model, length, batch, seed=5)
    second, later = range(length, 2 * length), range(1, 2 * length)
    places = {
        "induction": [(i, i - length + 1) for i in second],
        "previous token": [(i, i - 1) for i in later],
        "first token": [(i, 0) for i in later],
        "duplicate token": [(i, i - length) for i in second],
    }
    for kind, pairs in places.items():
        for layer in range(3):
            a = maps[f"layers.{layer}.mixer.pattern"].double()
            for head in range(4):
                expected = sum(float(a[row, head, i, j]) for row in range(batch) for i, j in pairs) / batch / len(pairs)
                assert float(found.scores[kind][layer, head]) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert not any(site.watched for site in sites(model).values())


@pytest.mark.parametrize(
    ("kind", "read", "key_of"),
    [
        ("induction", gf.lens.induction_scores, lambda i: (i - 10 + 1).clamp(min=0)),
        ("previous token", gf.lens.previous_token_scores, lambda i: (i - 1).clamp(min=0)),
        ("first token", gf.lens.first_token_scores, lambda i: i * 0),
        ("duplicate token", gf.lens.duplicate_token_scores, lambda i: torch.where(i < 10, i, i - 10)),
    ],
)
def test_a_head_that_does_nothing_else_has_score_one(kind: str, read: Any, key_of: Any):
    """The head's map is set by hand; the other heads attend to the query itself and score zero."""
    model = tiny("gpt2@1m")

    def look(pattern: Tensor) -> Tensor:
        at = torch.arange(20)
        made = torch.eye(20).expand_as(pattern).clone()
        made[:, 2] = torch.nn.functional.one_hot(key_of(at), 20).float()
        return made

    with gf.edit(model, {"layers.1.mixer.pattern": look}):
        found = read(model, length=10, batch=2)
    assert list(found.scores) == [kind] and found.scores[kind].shape == (3, 4)
    assert found.scores[kind][1].tolist() == [0, 0, 1, 0]


def induction_model(length: int, vocab_size: int, layers: int = 2) -> Model:
    """Returns an attention-only model with weights set by hand. The stream is [token | position | previous token],
    one-hot each: head 0 of layer 0 attends one position back and copies that token to the third part, head 0 of
    layer 1 attends to positions whose third part is the present token."""
    v, p = vocab_size, 2 * length
    d = v + p + v
    expression = f"gpt2@1m+ffn=none+rmsnorm+nobias+heads=1+layers={layers}+d_model={d}+vocab_size={v}+context={p}"
    model = gf.preset(expression).build(seed=0).double().eval()
    token, position, before = slice(0, v), slice(v, v + p), slice(v + p, d)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            if parameter.dim() == 2:
                parameter.zero_()
        model.embedding.weight.zero_()[:, token] = torch.eye(v)
        model.embedding.position.weight.zero_()[:, position] = torch.eye(p)
        first = model.layers[0].mixer
        q, k, value = first.qkv.weight.view(3, d, d)
        q[position, position] = torch.diag(torch.ones(p - 1), diagonal=1).double() * 20  # row i reads position i + 1
        k[position, position] = torch.eye(p).double() * 20
        value[before, token] = torch.eye(v).double()
        first.output.weight[before, before] = torch.eye(v).double()
        if layers > 1:
            q, k, _ = model.layers[1].mixer.qkv.weight.view(3, d, d)
            q[token, token] = torch.eye(v).double() * 20
            k[token, before] = torch.eye(v).double() * 20
            k[token, position.start] = -20  # the first token noted itself as the previous one
    return model


def test_a_model_built_to_do_induction_has_score_one_and_one_layer_cannot():
    found = gf.lens.head_scores(induction_model(8, 16), length=8)
    assert found.scores["induction"][1, 0] > 0.999 and found.scores["previous token"][0, 0] > 0.999
    assert found.scores["induction"][0, 0] < 1e-3
    alone = gf.lens.head_scores(induction_model(8, 16, layers=1), length=8)
    assert alone.scores["previous token"][0, 0] > 0.999 and alone.scores["induction"].max() < 1e-3


def test_tokens_are_repeated_and_different():
    tokens = repeated_tokens(50, 20, 8, seed=0)
    assert tokens.shape == (8, 40) and torch.equal(tokens[:, :20], tokens[:, 20:])
    assert all(len(set(row.tolist())) == 20 for row in tokens) and len({tuple(row.tolist()) for row in tokens}) == 8
    assert torch.equal(tokens, repeated_tokens(50, 20, 8, seed=0))
    few = repeated_tokens(5, 20, 2, seed=0)
    assert few.max() <= 4 and torch.equal(few[:, :20], few[:, 20:])


def test_layers_without_maps_have_no_scores():
    model = tiny("llama@1m")
    del model.layers[1].mixer.pattern
    vars(model.layers[1].mixer)["pattern"] = Site("bnst")  # outside the module tree: no site of the model
    found = gf.lens.induction_scores(model, length=5)
    assert found.scores["induction"][1].isnan().all() and not found.scores["induction"][[0, 2]].isnan().any()


def test_head_scores_have_summary_and_figure():
    found = gf.lens.head_scores(induction_model(8, 16), length=8, batch=3)
    assert str(found).splitlines()[0] == "mean attention on 3 rows of 8 random tokens, given twice"
    assert "induction: layer 1 head 0 1.00" in str(found)
    figure = found.figure()
    for ax, kind in zip(figure.axes, KINDS, strict=False):
        assert ax.get_title(loc="left") == kind
        torch.testing.assert_close(torch.tensor(np.asarray(ax.images[0].get_array())), found.scores[kind].float())
    assert found.to_dict()["scores"]["induction"] == found.scores["induction"].tolist()


def test_one_kind_needs_no_list():
    model = tiny("llama@1m")
    alone, listed = (gf.lens.head_scores(model, 5, kinds=kinds) for kinds in ("induction", ["induction"]))
    assert alone.to_dict() == listed.to_dict()


def test_a_broken_model_has_no_scores():
    model = tiny("llama@1m")
    with torch.no_grad():
        model.layers[1].mixer.qkv.weight.fill_(float("nan"))
    with failed(code="diverged"):
        gf.lens.head_scores(model, 5)


@pytest.mark.parametrize(
    ("given", "code", "field"),
    [
        ({"length": 1}, "range", "length"),
        ({"batch": 0}, "range", "batch"),
        ({"kinds": ["induktion"]}, "unknown", "kinds"),
        ({"length": 33}, "range", "tokens"),  # learned positions end there
    ],
)
def test_wrong_requests_are_one_sentence(given: dict[str, Any], code: str, field: str):
    with refused(code=code, field=field) as caught:
        gf.lens.head_scores(tiny("gpt2@1m"), **given)
    assert "\n" not in str(caught.value)
