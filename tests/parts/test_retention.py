"""Retention against its formula in complex numbers, and lightning attention against the published class."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import glassformer as gf
from glassformer.parts.forward_pass import Pass
from glassformer.parts.mixer import Retention, RetentionConfig
from glassformer.parts.mixer.chunked import CHUNK
from glassformer.parts.mixer.retention import lightning_decays, retnet_decays
from tests.refused import refused

SIZE = "layers=3+d_model=32+heads=4+vocab_size=61+context=64"


def moved(mixer: Any) -> Any:
    made = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.add_(torch.randn(weight.shape, generator=made, dtype=weight.dtype), alpha=0.2)
    return mixer


def definition(mixer: Retention, x: Tensor, documents: Tensor | None = None) -> Tensor:
    """o_t = sum_j gamma^(t-j) Re(q_t conj(k_j) e^(i (t-j) theta)) v_j over all pairs, as the paper writes it."""
    n, h, hv = mixer.n_heads, mixer.head_dim, mixer.value_dim
    q, k, v = (part.unflatten(-1, (n, -1)) for part in mixer.qkv(x).split(mixer.qkv.outs, dim=-1))
    q, k = (torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) for part in (q, k))
    theta = torch.tensor([10_000.0 ** -(i / (h / 2 - 1)) for i in range(h // 2)], dtype=torch.float64)
    s, y = x.shape[1], torch.zeros_like(v)
    for row in range(len(x)):
        for t in range(s):
            for j in range(t + 1):
                if documents is None or bool((documents[row, j : t + 1] == documents[row, t]).all()):
                    turned = q[row, t] * k[row, j].conj() * torch.polar(torch.ones_like(theta), (t - j) * theta)
                    gamma = torch.tensor(mixer.decays, dtype=torch.float64) ** (t - j)
                    y[row, t] += (gamma * turned.real.sum(-1) * h**-0.5)[:, None] * v[row, j]
    y = y / (y.square().mean(-1, keepdim=True) + mixer.eps).sqrt()
    return mixer.output(F.silu(mixer.gate_proj(x)) * y.reshape(len(x), s, n * hv))


@pytest.mark.parametrize("packed", [False, True])
def test_it_is_its_formula(packed: bool):
    """In outputs and in the gradient of every weight and of x."""
    mixer = moved(Retention(12, 3, 6, bias=True).double())
    x = torch.randn(2, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    documents = torch.tensor([[1] * 3 + [2] * 5, [0] * 2 + [1] * 6]) if packed else None
    wanted, found = definition(mixer, x, documents), mixer(x, Pass(0, 8, documents=documents))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)  # angles are those of fp32
    over = [x, *mixer.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad(found.sin().sum(), over), torch.autograd.grad(wanted.sin().sum(), over), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_retention_state_continues_and_rewinds():
    mixer, s = moved(Retention(16, 2).double()).eval(), CHUNK + 9
    x = torch.randn(2, s, 16, dtype=torch.float64)
    with torch.no_grad():
        full, memory = mixer(x), mixer.init_state(2, s, torch.float64, rewind=3)
        for first, last in ((0, 5), (5, CHUNK + 1), (CHUNK + 1, s)):
            torch.testing.assert_close(mixer(x[:, first:last], Pass(first, last), memory), full[:, first:last])
        memory.truncate(s - 3)
        torch.testing.assert_close(mixer(x[:, s - 3 :], Pass(s - 3, s), memory), full[:, s - 3 :])


@pytest.mark.parametrize("layer", [0, 2])
def test_lightning_is_the_published_class(layer: int):
    """MiniMax-01's class stores q, k and v head by head; outputs and every gradient are equal, over a border of its
    blocks."""
    pytest.importorskip("transformers")
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    n, h, d, s = 4, 6, 32, 21
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = MiniMaxConfig(hidden_size=d, num_attention_heads=n, head_dim=h, num_hidden_layers=3, layer_types=kinds,
                           block_size=8)  # fmt: skip
    theirs = moved(MiniMaxLightningAttention(config, layer).double())
    block = gf.preset(f"llama@1m+{SIZE}+lightning+head_dim={h}")
    ours = list(block.build(seed=0).double().layers)[layer].mixer
    by_head = theirs.qkv_proj.weight.unflatten(0, (n, 3, h)).transpose(0, 1).flatten(0, 2)
    with torch.no_grad():
        ours.qkv.weight.copy_(by_head)
        ours.gate_proj.weight.copy_(theirs.output_gate.weight)
        ours.norm.weight.copy_(theirs.norm.weight)
        ours.output.weight.copy_(theirs.out_proj.weight)
    ours.eps = theirs.norm.variance_epsilon
    x = torch.randn(2, s, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    theirs.slope_rate.copy_(theirs.get_slope_rate().double())
    wanted, _ = theirs(x, None, None)
    found = ours(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)  # their decays are fp32
    (of_x,) = torch.autograd.grad(found.sin().sum(), x, retain_graph=True)
    torch.testing.assert_close(
        of_x, torch.autograd.grad(wanted.sin().sum(), x, retain_graph=True)[0], rtol=1e-3, atol=1e-4
    )
    mine = torch.autograd.grad(found.sin().sum(), [ours.qkv.weight, ours.gate_proj.weight, ours.norm.weight])
    given = [theirs.qkv_proj.weight, theirs.output_gate.weight, theirs.norm.weight]
    qkv, *rest = torch.autograd.grad(wanted.sin().sum(), given)
    for a, b in zip(mine, [qkv.unflatten(0, (n, 3, h)).transpose(0, 1).flatten(0, 2), *rest], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_decays_are_those_of_the_papers():
    assert retnet_decays(3) == [1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128]
    assert retnet_decays(49)[-1] == 1 - 2**-53
    for n in (50, 64, 512):  # the paper's form for any number of heads
        spread = 1 - torch.linspace(math.log(1 / 32), math.log(1 / 512), n, dtype=torch.float64).exp()
        torch.testing.assert_close(torch.tensor(retnet_decays(n), dtype=torch.float64), spread)
    assert Retention(128, 64).n_heads == 64
    first, last = lightning_decays(8, 0, 4), lightning_decays(8, 3, 4)
    assert first == sorted(first) and 0.6 < first[0] < 0.61  # exp(-1/2)
    assert all(decay > 0.9999 for decay in last)
    model = gf.preset(f"llama@1m+{SIZE}+lightning").build(seed=0)
    assert [layer.mixer.decays for layer in model.layers] == [lightning_decays(4, i, 3) for i in range(3)]  # type: ignore[union-attr]


@pytest.mark.parametrize("decays", [(0.5, 1.0), (0.0, 0.5), (-0.1, 0.5), (0.5, 1.5), (0.5, float("nan"))])
def test_decays_outside_of_0_to_1_are_refused(decays: tuple[float, float]):
    with refused(code="range", field="mixer.decays"):
        Retention(16, 2, decays=decays)
    wrong = next(i for i, decay in enumerate(decays) if not 0 < decay < 1)
    with refused(code="range", field=f"decays.{wrong}"):
        RetentionConfig(decays=decays)


def test_retention_refuses_unsupported_settings():
    for change, code, field in (
        ("head_dim=5", "range", "mixer.head_dim"),
        ("mup", "conflict", "mup"),
        ("window:8", "unsupported", "mixer.visibility"),
        ("mixer.expand=0", "range", "stack.0.blocks.0.mixer.expand"),
    ):
        with refused(code=code, field=field):
            gf.preset(f"llama@1m+{SIZE}+retention+{change}").build()
    with refused(code="range", field="mixer.decays"):
        Retention(12, 3, decays=(0.5, 0.6))
    with refused(code="conflict", field="decays"):
        RetentionConfig(lightning=True, decays=(0.5, 0.6))
