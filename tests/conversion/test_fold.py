"""Reparametrised matrices leave as they are applied: published classes compute the same with the folder written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

import glassformer as gf
from glassformer.conversion.exports import family_of
from glassformer.conversion.gguf import llama_cpp
from glassformer.conversion.weights import fold
from glassformer.laboratory.proof import check
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.text import prepare
from glassformer.training import train
from tests.refused import refused

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TINY = "layers=2+d_model=16+heads=2+vocab_size=61+context=48"
TOKENS = torch.randint(61, (3, 11), generator=torch.Generator().manual_seed(5))


def trained(expression: str) -> Model:
    """Trains a model for a few large steps, so that sigma, its estimate and gamma differ."""
    model = preset(f"{expression}+{TINY}").build(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-2)
    for _ in range(4):
        optimizer.zero_grad()
        model.loss(TOKENS, TOKENS.roll(-1, 1)).backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("expression", ["llama@1m+gqa:1+sigmareparam", "gpt2@1m+sigmareparam:1"])
def test_a_published_class_computes_the_same(expression: str, tmp_path: Path):
    model = trained(expression)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    family = gf.save(model, None, tmp_path / "out")
    assert family.model_type == expression.partition("@")[0]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)
    back = gf.load(str(tmp_path / "out"))
    assert back.config.reparam is None
    torch.testing.assert_close(model(TOKENS), back.model(TOKENS), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_folding_is_not_the_weights_as_they_are():
    model = trained("llama@1m+sigmareparam")
    folded = fold(model)
    assert not torch.allclose(folded.layers[0].ffn.up_proj.weight, model.layers[0].ffn.up_proj.weight, rtol=1e-2)
    assert folded.embedding.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert folded.config == model.config.replace(reparam=None) and not folded.training and fold(model.train()).training


def test_a_plain_model_is_itself():
    model = preset(f"llama@1m+{TINY}").build()
    assert fold(model) is model


def test_exports_are_those_of_the_folded_model():
    for name in ("llama", "gpt2"):
        plain, held = (preset(f"{name}@1m+{TINY}{more}") for more in ("", "+sigmareparam"))
        for config in (plain, held):
            target = family_of(config)
            assert target is not None and target.family.model_type == name
        assert llama_cpp(held).supported == llama_cpp(plain).supported


def test_a_proof_holds_for_it():
    report = check(trained("llama@1m+sigmareparam"))
    assert report.passed and {row.verdict for row in report.rows} == {"ok"}


def logits(loaded: gf.convert.Loaded) -> Tensor:  # type: ignore[name-defined]
    tokens = torch.arange(12)[None] % loaded.config.vocab_size
    return loaded.model(tokens)


def test_changes_of_a_run_keep_its_function(tmp_path: Path):
    """A run with reparametrised layers is loaded unchanged, packed, plain, and reparametrised again; a plain run is
    loaded with reparametrisation."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat and ran. " * 400)
    text = prepare(tmp_path / "text.txt", "char", cache_dir=tmp_path / "cache")
    recipe = {"tokens": 8 * 4 * 32, "batch_size": 4, "context": 32, "learning_rate": 3e-2, "threads": 1}
    size = "layers=2+d_model=32+heads=2"
    for name, more in (("held", "+sigmareparam"), ("plain", "")):
        train(preset(f"llama@1m+{size}{more}"), text, recipe, tmp_path / name)
    held = gf.load(str(tmp_path / "held"))
    expected = logits(held)
    for change in ("reparam=none", "sigmareparam", "window:64"):
        again = gf.load(f"{tmp_path / 'held'}+{change}")
        torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-4)
        assert not again.fresh
    packed = gf.load(str(tmp_path / "held"), quantize="int8")
    assert packed.config.reparam is None and packed.model.config == packed.config
    assert (logits(packed) - expected).norm() < 0.05 * expected.norm()
    plain = gf.load(str(tmp_path / "plain"))
    taken = gf.load(f"{tmp_path / 'plain'}+sigmareparam")
    assert taken.config.reparam is not None and not taken.fresh
    torch.testing.assert_close(logits(taken), logits(plain), rtol=1e-4, atol=1e-4)
    with refused(code="unsupported", field="quantize"):
        gf.save(packed.model, None, tmp_path / "out")
