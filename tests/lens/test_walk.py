"""The steps of a pass: values of the model as it runs, each with a line of arithmetic that gives it."""

from __future__ import annotations

import math

import pytest
import torch

import glassformer as gf
from glassformer.lens.walk import walk
from tests.lens.test_arithmetic import number_of
from tests.refused import refused

KINDS = [
    "gpt2@0.1m+vocab_size=60", "llama@0.1m+vocab_size=60+gqa:1", "llama@0.1m+vocab_size=60+alibi+post",
    "llama@0.1m+vocab_size=60+moe:4:2", "llama@0.1m+vocab_size=60+mamba", "llama@0.1m+vocab_size=60+qknorm+sandwich",
    "gpt2@0.1m+vocab_size=60+parallel", "gemma-2-2b@0.1m+vocab_size=60", "llama@0.1m+vocab_size=60+mamba2",
    "bert@0.1m+vocab_size=60", "llama@0.1m+vocab_size=60+gain", "llama@0.1m+vocab_size=60+retention",
    "gpt2@0.1m+vocab_size=60+sinusoidal", "gpt2@0.1m+vocab_size=60+embedding.position.offset=2",
]  # fmt: skip
IDS = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("expression", KINDS)
def test_steps_of_any_model_are_its_captured_values(expression: str) -> None:
    model = gf.preset(expression).build(seed=0).eval()
    before = model(torch.tensor([IDS]))
    seen = gf.capture(model, [IDS], "*")
    layer = len(model.layers) - 1
    steps = walk(model, [IDS], layer)
    assert len(steps) >= 8 and any(step.arithmetic is not None for step in steps)
    assert all(step.arithmetic is not None for step in steps if step.place in ("embedding", "embedding.position"))
    for step in steps:
        given = seen.get(step.place)
        if given is not None and step.key not in ("logits", "probabilities", "scores", "final_norm"):
            assert torch.allclose(given[0].float(), step.value, atol=1e-5), step.place
        if step.arithmetic is not None and step.value.dim() == 2:
            line = step.arithmetic.cell(0, 2, 1)
            assert number_of(line.split()[-1]) == pytest.approx(float(step.value[2, 1]), rel=0.02, abs=0.006), line
    assert torch.equal(model(torch.tensor([IDS])), before)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("expression", ["llama@0.1m+vocab_size=60+gqa:1", "gpt2@0.1m+vocab_size=60"])
def test_all_of_attention_is_worked_out(expression: str) -> None:
    steps = walk(gf.preset(expression).build(seed=0).eval(), [IDS])
    formulas = {step.key: step.arithmetic.formula for step in steps if step.arithmetic is not None}
    assert {"mixer_norm", "q", "k", "v", "scores", "mask", "pattern", "z", "out", "resid_mid", "ffn_norm", "hidden",
            "resid_post", "final_norm", "logits", "probabilities"} <= formulas.keys()  # fmt: skip
    mask = next(step for step in steps if step.key == "mask")
    assert bool((mask.value[0].triu(1) == -math.inf).logical_or(torch.ones(5, 5).tril().bool()).all())


def test_walk_refuses_encoder_decoder_models() -> None:
    model = gf.preset("t5@0.1m").build(seed=0)
    with refused(code="unsupported", field="model"):
        walk(model, [IDS])
