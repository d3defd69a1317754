"""Memory of training: states are what optimizers hold, stages divide them, wrong layouts are refused."""

from __future__ import annotations

import json

import pytest
import torch

import glassformer as gf
from glassformer.cli import main
from glassformer.errors import RequestError
from glassformer.planning.layout import Layout
from glassformer.training import Recipe


@pytest.mark.parametrize("kind", ["adamw", "lion", "sgd", "adafactor", "muon"])
def test_state_values_are_those_after_a_step(kind: str):
    model = gf.preset("llama@1m+vocab_size=65+untied").build()
    config = Recipe.of(tokens=1, optimizer=kind).optimizer
    optimizer = config.create(model, 1e-3, 0.1)
    tokens = torch.randint(65, (1, 8))
    model.loss(tokens, tokens).backward()
    optimizer.step()
    told = config.state_values(model)
    for name, weight in model.named_parameters():
        held = [v for key, v in optimizer.state[weight].items() if isinstance(v, torch.Tensor) and key != "step"]
        assert told[name] == sum(values.numel() for values in held), name


def test_stages_divide_what_they_say():
    """16 N bytes without ZeRO; 1910.02054, figure 1, with fp32 weights: 8 + 8 / W, 4 + 12 / W, 16 / W."""
    config, ranks = gf.preset("llama-7b"), 64
    n = config.num_params()
    for stage, each in enumerate([16, 8 + 8 / ranks, 4 + 12 / ranks, 16 / ranks]):
        memory = gf.plan(config, train=True, batch=ranks, layout=f"dp={ranks},zero={stage}").memory
        assert memory["weights"] + memory["gradients"] + memory["optimizer"] == pytest.approx(each * n)
        assert memory["total"] == sum(value for name, value in memory.items() if name != "total")
        assert (memory["buffers"] > 0) == (stage == 3)


def test_recomputation_takes_less_memory_and_more_flops():
    config = gf.preset("llama-7b")
    none, some, full = (gf.plan(config, train=True, recompute=how) for how in ("none", "selective", "full"))
    assert none.memory["activations"] > some.memory["activations"] > full.memory["activations"] > 0
    assert full.memory["total"] < none.memory["total"] and none.step_flops == some.step_flops < full.step_flops
    assert none.step_flops == 3 * config.flops(config.context) * config.context


@pytest.mark.parametrize(
    ("asked", "field", "sentence"),
    [
        ({"batch": 6, "layout": "dp=4"}, "dp", "dp=3 would do"),
        ({"batch": 8, "layout": "dp=8,zero=4"}, "zero", "from 0 to 3"),
        ({"layout": "pd=8"}, "layout", "layout: unknown word"),
        ({"context": 1 << 40}, "context", "from 1 to"),
        ({"recompute": "some"}, "recompute", "none, selective, full"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, object], field: str, sentence: str):
    with pytest.raises(RequestError, match=sentence) as caught:
        gf.plan(gf.preset("llama-7b"), train=True, **asked)  # type: ignore[call-overload]
    assert caught.value.field == field


def test_the_verb_says_what_the_function_does(capsys: pytest.CaptureFixture[str]):
    command = ["plan", "llama-7b", "--train", "--batch", "8", "--layout", "dp=8,zero=3", "--recompute", "full"]
    assert main(command) == 0
    assert "8 ranks, ZeRO stage 3" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    plan = gf.plan(gf.preset("llama-7b"), train=True, batch=8, layout="dp=8,zero=3", recompute="full")
    assert facts["memory"] == plan.memory
    assert main(["plan", "llama-7b", "--layout", "dp=8"]) == 2


@pytest.mark.parametrize(
    ("model", "layout", "field", "near"),
    [
        ("llama-7b", "tp=3", "tp", "2"),  # 32 heads, 11,008 hidden
        ("llama-3-8b", "tp=16", "tp", "8"),  # 8 heads of keys and values
        ("llama-7b", "pp=33", "pp", "32"),
        ("llama-7b", "pp=16,interleave=4", "interleave", "2"),
        ("llama-7b", "cp=3", "cp", "2"),
        ("llama-7b", "dp=8,ep=8", "ep", "1"),  # no experts
        ("mixtral-8x7b", "dp=16,ep=16", "ep", "8"),
        ("mixtral-8x7b", "dp=8,ep=3", "ep", "2"),
        ("llama-7b", "dp=4,micro=3", "micro", "2"),
        ("llama-7b", "sp=1", "sp", ""),
    ],
)
def test_layouts_that_do_not_divide_name_the_nearest_that_does(model: str, layout: str, field: str, near: str):
    config = gf.preset(model)
    with pytest.raises(RequestError, match=f"{field}=" + (f".*{field}={near}\\b" if near else "")) as caught:
        Layout.of(layout).check(config, 16, 2048)
    assert caught.value.field == field
    if near:
        Layout.of(layout).vary(**{field: int(near)}).check(config, 16, 2048)


def test_a_layout_is_read_by_words():
    assert Layout.of("fsdp=8,tp=2,sp=1,recompute=full") == Layout(dp=8, zero=3, tp=2, sp=True, recompute="full")
    assert Layout.of("dp=4,cp=2,tp=8,pp=16").ranks == 1024 and Layout.of("dp=4,micro=2").microbatches(16) == 2
    for wrong, field in [("fsdp=8,zero=1", "zero"), ("tp=x", "tp"), ("sp=2", "sp"), ("recompute=some", "recompute")]:
        with pytest.raises(RequestError) as caught:
            Layout.of(wrong)
        assert caught.value.field == field
