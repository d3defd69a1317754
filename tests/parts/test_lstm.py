"""LSTM and GRU against torch's modules and against their equations token by token; the gated convolution against
torch's; their FLOPs, initialisation and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import glassformer as gf
from glassformer.conversion.exports import export_targets
from glassformer.introspection import edit
from glassformer.parts.forward_pass import Pass
from glassformer.parts.mixer import GRU, LSTM, Conv
from glassformer.parts.mixer.lstm import GatedRNN
from glassformer.parts.mup import parameter_groups
from tests.refused import refused

D, C, S = 24, 20, 37
KINDS = {"lstm": (LSTM, nn.LSTM), "gru": (GRU, nn.GRU)}
NAMES = {"in_proj.weight": "weight_ih_l0", "hidden_proj.weight": "weight_hh_l0",
         "in_proj.bias": "bias_ih_l0", "hidden_proj.bias": "bias_hh_l0"}  # fmt: skip


def moved(module: Any) -> Any:
    """Every parameter moved off its start, in fp64."""
    made = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn(weight.shape, generator=made), alpha=0.3)
    return module.double()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(y: Tensor, weights: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.sin().sum(), list(weights))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrence_is_torchs_module(kind: str, bias: bool):
    """In outputs and in the gradient of every parameter, with a map of h after it."""
    mine: GatedRNN = moved(KINDS[kind][0](D, C, bias))
    theirs = KINDS[kind][1](D, C, bias=bias, batch_first=True).double()
    names = {ours: name for ours, name in NAMES.items() if bias or "weight" in ours}
    theirs.load_state_dict({name: mine.get_parameter(ours) for ours, name in names.items()})
    x = drawn(2, S, D)
    wanted = F.linear(theirs(x)[0], mine.out_proj.weight, mine.out_proj.bias)
    found = mine(x)
    torch.testing.assert_close(found, wanted)
    ours = gradients(found, (mine.get_parameter(name) for name in names))
    for a, b in zip(ours, gradients(wanted, (theirs.get_parameter(name) for name in names.values())), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_operator_equals_the_equations_token_by_token(kind: str, dtype: torch.dtype):
    """In outputs and all gradients, from a state too; documents are given, so that the definition computes."""
    mixer = moved(KINDS[kind][0](D, C)).to(dtype)
    x = drawn(2, S, D).to(dtype).requires_grad_()
    at_once, steps = mixer(x), mixer(x, Pass(0, S, documents=torch.ones(2, S, dtype=torch.long)))
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(at_once, steps, **close)
    learned = [x, *mixer.parameters()]
    for a, b in zip(gradients(at_once, learned), gradients(steps, learned), strict=True):
        torch.testing.assert_close(a, b, **close)
    kept = {name: drawn(2, C).to(dtype) for name in mixer.kept}
    w, u = mixer.in_proj.affine(), mixer.hidden_proj.affine()
    y, last = mixer.fused(x, kept, [w[0], u[0], w[1], u[1]])
    made = mixer.naive(x, kept, None, w, u)
    torch.testing.assert_close(y, made["h"], **close)
    for name in mixer.kept:
        torch.testing.assert_close(last[name], made[name][:, -1], **close)


@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_those_of_torchs_separate_operations(kind: str):
    """Without oneDNN the recurrence is made of matrix products, which the counter of torch knows."""
    mixer, x = KINDS[kind][0](D, C), torch.randn(2, S, D)
    counts = []
    for enabled in (True, False):
        with torch.backends.mkldnn.flags(enabled=enabled), torch.no_grad(), FlopCounterMode(display=False) as counter:
            mixer(x)
        counts.append(counter.get_total_flops())
    gates = len(mixer.gates)
    assert counts == [2 * 2 * S * (gates * C * (D + C) + C * D)] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_recurrence_is_initialised_as_torchs(kind: str):
    """Uniform weights and zero biases, but one for the forget gate; only matrices decay."""
    torch.manual_seed(0)
    mixer: GatedRNN = KINDS[kind][0](256, 256)
    for maps in (mixer.in_proj, mixer.hidden_proj):
        assert maps.weight.abs().max() <= 256**-0.5 < 1.01 * maps.weight.abs().max()
    biases = dict(zip(mixer.gates, mixer.in_proj.bias.chunk(len(mixer.gates)), strict=True))
    assert {name: set(bias.tolist()) for name, bias in biases.items()} == {
        name: {1.0} if (kind, name) == ("lstm", "f") else {0.0} for name in biases
    }
    assert not mixer.hidden_proj.bias.any()
    decays = {id(weight) for weight in parameter_groups(mixer, 1.0, 0.1, {})[0]["params"]}
    found = {name for name, weight in mixer.named_parameters() if id(weight) in decays}
    assert found == {f"{name}.weight" for name in ("in_proj", "hidden_proj", "out_proj")}


@pytest.mark.parametrize("width", [2, 5, 50])
def test_convolution_is_torchs(width: int):
    """A causal 1-d convolution of all channels and a gated linear unit, in outputs and gradients."""
    mixer, x = moved(Conv(D, width)), drawn(2, S, D)
    weight = mixer.proj.weight.detach().clone().requires_grad_()
    kernel = weight.unflatten(1, (width, D)).flip(1).transpose(1, 2)  # (2 d, d, K), the oldest token first
    wanted = F.glu(F.conv1d(F.pad(x.mT, (width - 1, 0)), kernel, mixer.proj.bias), dim=1).mT
    found = mixer(x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients(found, [mixer.proj.weight]), gradients(wanted, [weight]))


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_gates_are_shown_and_not_edited(name: str):
    model, tokens = (
        gf.preset(f"gpt2@1m+layers=1+d_model=32+heads=4+vocab_size=61+{name}").build(seed=0),
        torch.arange(7),
    )
    seen = gf.capture(model, tokens[None], "layers.0.mixer.*")
    mixer: Any = model.layers[0].mixer
    assert {f"layers.0.mixer.{one}" for one in mixer.made} < set(seen)
    gate = f"layers.0.mixer.{mixer.made[0]}"
    assert seen[gate].min() > 0 and seen[gate].max() < 1
    with refused(code="unsupported", field=f"mixer.{mixer.made[0]}"), edit(model, {gate: torch.zeros_like}):
        model(tokens[None])


@pytest.mark.parametrize(
    ("expression", "code", "field"),
    [
        ("lstm+mixer.width=0", "range", "stack.0.blocks.0.mixer.width"),
        ("conv:1", "range", "width"),
        ("conv:x", "range", "conv"),
        ("lstm:3", "range", "lstm"),
        *((f"{name}+mup", "conflict", "mup") for name in ("lstm", "gru", "conv")),
        ("gru+bidirectional", "unsupported", "mixer.visibility"),
    ],
)
def test_wrong_requests_are_refused(expression: str, code: str, field: str):
    with refused(code=code, field=field):
        gf.preset(f"llama@1m+{expression}")


@pytest.mark.parametrize("name", ["lstm", "gru", "conv"])
def test_no_published_family_takes_their_weights(name: str, tmp_path: Path):
    """Each family is blocked, and the refusal names the mixer."""
    model = gf.preset(f"llama@1m+layers=1+d_model=32+heads=4+vocab_size=61+{name}").build(seed=0)
    assert not any(target.supported for target in export_targets(model.config))
    with refused(code="unsupported", field="mixer"):
        gf.save(model, None, tmp_path, family="llama")
