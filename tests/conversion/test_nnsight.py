"""nnsight opens our models as it opens others, and sees what our own capture sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.naming import preset

nnsight = pytest.importorskip("nnsight", reason="nnsight is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Module .* has a submodule named 'output'"),  # .E_output there
    pytest.mark.usefixtures("without_gradients"),
]

TOKENS = torch.arange(12).view(2, 6)
TINY = "layers=3+d_model=16+heads=2+vocab_size=13+context=16"


@pytest.fixture
def without_gradients() -> Iterator[None]:
    """Both sides take the passes of a forward without gradients, which have the same bits."""
    with torch.no_grad():
        yield


@pytest.mark.parametrize("expression", ["gpt2@1m+alibi+rmsnorm+swiglu", "llama@1m+gqa:1"])
def test_a_trace_equals_capture(expression: str):
    model = preset(f"{expression}+{TINY}").build(seed=0).eval()
    names = ["layers.1.mixer.z", "layers.1.ffn.out", "layers.1.resid_post", "layers.2.mixer.out", "logits"]
    seen = gf.capture(model, TOKENS, names)
    model.layers[1].mixer.z.register_forward_hook(lambda *_: None)  # a site is called only while it has observers
    opened = nnsight.NNsight(model)
    with opened.trace(TOKENS):
        z = opened.layers[1].mixer.z.output.save()
        ffn = opened.layers[1].ffn.output.save()
        layer = opened.layers[1].output.save()
        mixer = opened.layers[2].mixer.output.save()
        logits = opened.output.save()
    for name, value in zip(names, [z, ffn, layer, mixer, logits], strict=True):
        assert torch.equal(value, seen[name]), name


def test_an_edit_reaches_the_logits():
    """A layer's FFN, silenced through nnsight, gives the logits of an edit with zeros."""
    model = preset(f"llama@1m+{TINY}").build(seed=0).eval()
    opened = nnsight.NNsight(model)
    with opened.trace(TOKENS):
        opened.layers[1].ffn.output = torch.zeros_like(opened.layers[1].ffn.output)
        edited = opened.output.save()
    assert not torch.equal(edited, model(TOKENS))
    model.layers[1].ffn.down_proj.weight.zero_()
    assert torch.equal(edited, model(TOKENS))


def test_a_wrapped_model_opens_too(tmp_path: Path):
    """Behind the interface of `transformers`, as `nnsight.LanguageModel` would hold it."""
    pytest.importorskip("transformers")
    from glassformer.conversion.transformers import GlassformerForCausalLM

    model = preset(f"gpt2@1m+alibi+{TINY}").build(seed=0).eval()
    opened = nnsight.NNsight(GlassformerForCausalLM.of(model))
    with opened.trace(TOKENS):
        layer = opened.model.layers[0].output.save()
        out = opened.output.save()
    seen = gf.capture(model, TOKENS, ["layers.0.resid_post", "logits"])
    assert torch.equal(layer, seen["layers.0.resid_post"])
    assert torch.equal(out.logits, seen["logits"])
