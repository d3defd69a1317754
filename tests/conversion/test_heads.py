"""Key/value heads of a loaded model, pooled to fewer and repeated to more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.conversion import adapt
from glassformer.conversion.heads import first, mean, new, regrouped
from glassformer.loaded import Loaded
from glassformer.parts.linear import Linear

TINY = "+layers=2+d_model=24+heads=6+head_dim=4+hidden=16+vocab_size=32"
TOKENS = torch.arange(18).view(2, 9) % 32


def loaded(expression: str) -> Loaded:
    config = gf.preset(expression)
    model = config.build(seed=1)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    return Loaded(model.eval(), config, None)


def test_means_are_those_of_the_paper() -> None:
    heads = torch.arange(6.0)[:, None].expand(6, 2)
    for groups, expected in ((1, [2.5]), (2, [1.0, 4.0]), (3, [0.5, 2.5, 4.5])):
        assert regrouped(heads, torch.zeros(groups, 2))[:, 0].tolist() == expected
        firsts = regrouped(heads, torch.zeros(groups, 2), first)[:, 0].tolist()
        assert firsts == [6.0 / groups * i for i in range(groups)]
    # 3 heads serve query heads 0-1, 2-3, 4-5, and of 2 each serves three.
    assert regrouped(heads[:3], torch.zeros(2, 2))[:, 0].tolist() == pytest.approx([1 / 3, 5 / 3])
    assert torch.equal(regrouped(heads, torch.ones(2, 2), new), torch.ones(2, 2))


@pytest.mark.parametrize("model", ["llama", "gpt2", "llama+mixer.projection.kind=separate"])
def test_more_heads_compute_the_same_and_equal_heads_are_pooled_without_loss(model: str) -> None:
    grouped = loaded(f"{model}{TINY}+gqa:2")
    with torch.no_grad():
        logits = grouped.model(TOKENS)
        whole = adapt(grouped, gf.preset(f"{model}{TINY}+mha"))
        assert whole.fresh == () and whole.regrouped
        assert torch.allclose(whole.model(TOKENS), logits, atol=1e-5)
        for how in (mean, first):
            back = adapt(whole, grouped.config, how)
            assert torch.allclose(back.model(TOKENS), logits, atol=1e-5)


def test_queries_stay_and_new_heads_are_named() -> None:
    whole = loaded(f"gpt2{TINY}")
    single = gf.preset(f"gpt2{TINY}+mqa")
    for how in (mean, new):
        found = adapt(whole, single, how)
        was, now = whole.model.layers[0].mixer.matrices(), found.model.layers[0].mixer.matrices()
        assert torch.equal(now["q"].applied(), was["q"].applied())
        same = torch.allclose(now["k"].applied()[0], was["k"].applied().mean(0))
        bias = isinstance(now["v"].linear, Linear) and now["v"].within(now["v"].bias).flatten()
        assert torch.allclose(bias, was["v"].within(was["v"].bias).mean(0)) == same == (how is mean)
        names = {f"layers.{at}.mixer.qkv.{leaf}" for at in range(2) for leaf in ("weight", "bias")}
        assert set(found.fresh if how is new else found.regrouped) == names
        assert (found.regrouped if how is new else found.fresh) == ()


def test_expression_pools_loaded_keys_and_values(tmp_path: Path) -> None:
    whole = loaded(f"llama{TINY}")
    gf.save(whole.model, None, tmp_path / "whole")
    found = gf.load(f"{tmp_path / 'whole'}+gqa:3")
    assert found.fresh == () and len(found.regrouped) == 2 and next(found.config.layers()).mixer.n_kv_heads == 3
    keys = whole.model.layers[1].mixer.matrices()["k"].applied().unflatten(0, (3, 2)).mean(1)
    assert torch.allclose(found.model.layers[1].mixer.matrices()["k"].applied(), keys)
    assert found.adapted == ["2 parameters have keys and values made of other numbers of heads"]
