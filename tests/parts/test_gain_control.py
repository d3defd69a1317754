"""Gain-controlled attention: z less the mean of the values that a token sees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glassformer.introspection import capture
from glassformer.naming import preset
from glassformer.parts.mixer import Attention
from glassformer.parts.visibility import Bidirectional, Causal, SlidingWindow, Visibility

TINY = "layers=4+d_model=32+heads=4+vocab_size=61+context=64"


def by_hand(attention: Attention, x: Tensor, seen: Tensor) -> Tensor:
    """Head by head, token by token; seen (s, s): who sees whom."""
    n, g, h = attention.n_heads, attention.n_kv_heads, attention.head_dim
    q, k, v = (part.unflatten(-1, (-1, h)) for part in attention.qkv(x).split((n * h, g * h, g * h), -1))
    z = torch.empty_like(q)
    for i in range(n):
        j = i * g // n
        for s in range(x.shape[1]):
            keys = seen[s].nonzero().flatten()
            weights = (q[:, s, i, None] * k[:, keys, j]).sum(-1).mul(h**-0.5).softmax(-1)
            z[:, s, i] = (weights[..., None] * v[:, keys, j]).sum(1) - v[:, keys, j].mean(1)
    return attention.output(z.flatten(-2))


@pytest.mark.parametrize("kv", [4, 2, 1])
@pytest.mark.parametrize("visibility", [Causal(), SlidingWindow(3), Bidirectional()], ids=lambda v: type(v).__name__)
def test_it_is_its_formula(visibility: Visibility, kv: int):
    attention = Attention(16, 4, kv, bias=True, visibility=visibility, gain_control=True)
    with torch.no_grad():
        attention.qkv.weight.mul_(3)
    x, at = torch.randn(2, 7, 16), torch.arange(7)
    seen = visibility.visible(at, at, at[:, None], at[None]).expand(7, 7)
    torch.testing.assert_close(attention(x), by_hand(attention, x, seen))


def test_gain_control_removes_the_component_common_to_all_tokens():
    """Equal values give zero, uniform attention gives zero, and so does the first token, which attends only to
    itself."""
    attention, x = Attention(16, 4, gain_control=True), torch.randn(2, 7, 16)
    assert attention(x)[:, 0].abs().max() < 1e-6
    assert attention(x[:, :1].expand(2, 7, 16)).abs().max() < 1e-6
    with torch.no_grad():
        attention.qkv.weight[:32] = 0
    assert attention(x).abs().max() < 1e-6


def test_for_many_tokens_it_is_the_mean_over_the_sequence():
    """The paper's form, mean over s of z_s, at random weights without a mask: both means are mean v, up to sqrt(t)."""
    torch.manual_seed(0)
    gaps = []
    for t in (64, 4096):
        mine, plain = (Attention(16, 2, visibility=Bidirectional(), gain_control=on) for on in (True, False))
        mine.load_state_dict(plain.state_dict())
        x = torch.randn(1, t, 16)
        with torch.no_grad():
            z = plain(x)
            gaps.append(((mine(x) - (z - z.mean(1, keepdim=True))).norm() / z.norm()).item())
    assert gaps[1] < 0.3 * gaps[0] and gaps[1] < 0.1


def test_gain_control_keeps_tokens_apart_in_attention_only_layers():
    """Four layers whose branches are attention, at the start of training: the cosine between tokens."""
    cosines = []
    for change in ("", "+gain"):
        model = preset(f"gpt2@1m+{TINY}+post+nope+ffn=none+init=xavier{change}").build(seed=0)
        x = capture(model, torch.randint(0, 61, (2, 48)), "layers.3.resid_post")["layers.3.resid_post"]
        unit = torch.nn.functional.normalize(x, dim=-1)
        cosines.append((unit @ unit.transpose(1, 2))[:, 24:, 24:].mean().item())
    assert cosines[1] < cosines[0] - 0.1


def test_decoding_with_gain_control_equals_full_pass():
    """Decoding step by step, behind a window that has turned, is the whole text at once."""
    for change in ("", "+window:5"):
        model = preset(f"llama@1m+{TINY}+gain{change}").build(seed=0).eval()
        tokens = torch.randint(0, 61, (2, 20))
        state = model.init_state(2, 20)
        with torch.no_grad():
            steps = torch.cat([model(tokens[:, i : i + 1], state) for i in range(20)], 1)
            torch.testing.assert_close(steps, model(tokens), rtol=1e-4, atol=1e-5)


def test_dropout_does_not_drop_the_subtracted_mean():
    attention = Attention(16, 4, gain_control=True, dropout=0.999999).train()
    x = torch.randn(2, 7, 16)
    v = attention.qkv(x)[..., 32:].unflatten(-1, (4, 4))
    mean = v.cumsum(1) / torch.arange(1, 8).view(1, 7, 1, 1)
    torch.testing.assert_close(attention(x), attention.output(-mean.flatten(-2)))
