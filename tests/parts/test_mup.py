"""muP: nothing changes at the base width, and at others what table 8 of 2203.03466 says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import glassformer as gf
from glassformer.config import ModelConfig
from glassformer.dynamics.watch import Moment
from glassformer.naming import preset
from glassformer.parts.linear import Linear
from glassformer.parts.mup import Mup, parameter_groups
from glassformer.training.optimizers import AdamWConfig
from glassformer.training.recipe import default_learning_rate

transformers.logging.set_verbosity_error()
TINY = "layers=2+heads=4+vocab_size=61+context=64"
TOKENS = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(0))


def at(width: int, change: str = "", family: str = "llama") -> ModelConfig:
    return preset(f"{family}@1m+{TINY}+d_model={width}{change}")


@pytest.mark.parametrize(
    "change", ["", "+tied", "+init=xavier", "+init=small", "+deepnorm", "+qknorm", "+sigmareparam"]
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_at_the_base_width_nothing_changes(family: str, change: str):
    plain, scaled = (at(32, change + more, family).build(seed=0) for more in ("", "+mup:32"))
    for (name, a), (_, b) in zip(plain.named_parameters(), scaled.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    torch.testing.assert_close(plain(TOKENS), scaled(TOKENS))
    groups = [parameter_groups(model, 1e-2, 0.1, model.config.rates) for model in (plain, scaled)]
    for a, b in zip(*groups, strict=True):
        assert {name: a[name] for name in ("lr", "weight_decay", "scale")} == {
            name: b[name] for name in ("lr", "weight_decay", "scale")
        }


@pytest.mark.parametrize("init", ["init=gpt2", "init=xavier", "init=small"])
def test_initial_weights_follow_mup(init: str, base: int = 64, width: int = 256):
    """Variance of the layers' matrices as at the base width times base / width; tables and head as at the base."""
    wide = at(width, f"+untied+{init}+mup:{base}").build(seed=0)
    narrow = at(base, f"+untied+{init}").build(seed=0)
    linears = [[m for m in model.modules() if isinstance(m, Linear)] for model in (wide, narrow)]
    for a, b in zip(*linears, strict=True):
        for mine, theirs in zip(a.weight.split(a.outs), b.weight.split(b.outs), strict=True):
            expected = theirs.std().item() * math.sqrt(base / width)
            assert mine.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * theirs.numel()))
    for mine, theirs in ((wide.embedding.weight, narrow.embedding.weight), (wide.head.weight, narrow.head.weight)):
        assert mine.std().item() == pytest.approx(theirs.std().item(), rel=4 / math.sqrt(2 * theirs.numel()))


def test_scores_and_logits_are_scaled():
    model = at(64, "+mup:16").build(seed=0)
    mixer = model.layers[0].mixer
    assert mixer.head_dim == 16 and mixer.scale == pytest.approx(math.sqrt(16 / 4) / 16)
    assert model.head.scale == 16 / 64
    x = torch.randn(1, 3, 64)
    torch.testing.assert_close(model.head(x), x @ model.head.weight.T / 4)
    given = at(64, "+mup:16+mixer.scale=0.3+head.scale=0.5").build(seed=0)
    assert given.layers[0].mixer.scale == 0.3 and given.head.scale == 0.125
    own = at(64, "+mup:16+mup.base_head_dim=8").build(seed=0)
    assert own.layers[0].mixer.scale == pytest.approx(math.sqrt(8) / 16)


@pytest.mark.parametrize("tied", ["+tied", "+untied"])
def test_the_first_step_of_adam_is_the_learning_rate_of_each_weight(tied: str):
    """Adam's first step moves every value by lr (g / |g|): by lr r in the layers' matrices, by lr elsewhere."""
    model = at(64, f"+mup:16{tied}", "gpt2").build(seed=0)
    optimizer = AdamWConfig(eps=1e-30).create(model, 1e-3, 0.0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    model.loss(TOKENS, TOKENS.roll(-1, 1)).backward()
    optimizer.step()
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, Linear)}
    for name, parameter in model.named_parameters():
        rate = 1e-3 * (0.25 if id(parameter) in matrices else 1.0)
        moved = (parameter - before[name]).abs().max().item()
        assert moved == pytest.approx(rate, rel=1e-3), name


def test_decay_keeps_its_product_with_the_rate():
    model = at(64, "+mup:16").build(seed=0)
    groups = parameter_groups(model, 1e-3, 0.1, model.config.rates)
    decayed = [group for group in groups if group["weight_decay"]]
    assert len(decayed) == 2 and all(g["lr"] * g["weight_decay"] == pytest.approx(1e-4) for g in decayed)
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


def test_without_it_there_are_the_two_groups_of_decay():
    model = at(64).build(seed=0)
    first, second = parameter_groups(model, 1e-3, 0.1, model.config.rates)
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
    assert first["lr"] == second["lr"] == 1e-3 and first["scale"] == second["scale"] == 1.0
    wanted = [p for p in model.parameters() if p.dim() == 2 and p is not model.embedding.weight]
    assert [id(p) for p in first["params"]] == [id(p) for p in wanted]


def test_the_default_rate_is_that_of_the_base_width():
    assert default_learning_rate(at(256, "+mup:64")) == pytest.approx(default_learning_rate(at(64)), rel=1e-2)
    assert default_learning_rate(at(256)) < default_learning_rate(at(64))


def test_a_run_scales_each_group_by_the_schedule(tmp_path: Path):
    """Rates after a step of the loop: the schedule's, times the group's own."""
    from glassformer.text import prepare
    from glassformer.training import Callback, train
    from glassformer.training.state import Training

    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 300)
    seen: list[list[tuple[float, float]]] = []

    class Rates(Callback):
        def after_update(self, run: Training, moment: Moment) -> None:
            seen.append([(g["lr"] / moment.learning_rate, g["scale"]) for g in moment.optimizer.param_groups])

    recipe = {"tokens": 3 * 2 * 16, "batch_size": 2, "context": 16, "threads": 1, "learning_rate": 1e-3}
    text = prepare(tmp_path / "text.txt", "char", cache_dir=tmp_path / "cache")
    train(at(32, "+mup:16"), text, recipe, callbacks=[Rates()])
    assert len(seen) == 3 and {scale for row in seen for _, scale in row} == {0.5, 1.0}
    assert all(found == pytest.approx(scale) for row in seen for found, scale in row)


def test_a_published_class_computes_the_same(tmp_path: Path):
    """Granite's multipliers hold the scales of scores and logits."""
    model = at(64, "+mup:16+gqa:2").build(seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    assert gf.save(model, None, tmp_path / "out").model_type == "granite"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)
    assert gf.load(str(tmp_path / "out")).config.mup is None


def test_config_holds_mup_and_resolves_it():
    config = at(64, "+mup:16")
    assert config.mup == Mup(base_width=16) and ModelConfig.from_dict(config.to_dict()) == config
    assert config.resolved().mup is None and config.resolved() == config.resolved().resolved()
    assert config.num_params() == at(64).num_params() and config.flops(8) == at(64).flops(8)
