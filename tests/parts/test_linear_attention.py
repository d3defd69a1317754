"""Linear attention against its formula, in both of its directions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import glassformer as gf
from glassformer import lens
from glassformer.errors import RequestError
from glassformer.introspection import capture, edit
from glassformer.parts.forward_pass import Pass
from glassformer.parts.mixer import LinearAttention
from glassformer.parts.mixer.chunked import CHUNK
from glassformer.parts.mixer.linear_attention import Feature, positive
from glassformer.parts.visibility import Bidirectional
from tests.refused import refused

SIZE = "layers=2+d_model=32+heads=4+vocab_size=61+context=64"


def definition(mixer: LinearAttention, x: Tensor, causal: bool, documents: Tensor | None = None) -> Tensor:
    """All pairs of tokens, one by one."""
    q, k, v = (part.unflatten(-1, (mixer.n_heads, -1)) for part in mixer.qkv(x).split(mixer.qkv.outs, dim=-1))
    phi, keys = (F.elu(q) + 1, F.elu(k) + 1) if mixer.feature == "elu" else (q, k)
    z = torch.zeros_like(v)
    for row in range(len(x)):
        for t in range(x.shape[1]):
            seen = [j for j in range(x.shape[1]) if (j <= t or not causal)
                    and (documents is None or documents[row, j] == documents[row, t])]  # fmt: skip
            for n in range(mixer.n_heads):
                weights = keys[row, seen, n] @ phi[row, t, n]
                over = weights.sum() if mixer.feature == "elu" else len(seen)
                z[row, t, n] = weights @ v[row, seen, n] / over
    return mixer.output(z.flatten(-2))


def moved(mixer: LinearAttention) -> LinearAttention:
    made = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.add_(torch.randn(weight.shape, generator=made, dtype=weight.dtype), alpha=0.3)
    return mixer


@pytest.mark.parametrize("feature", ["elu", "identity"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_its_formula(causal: bool, packed: bool, feature: Feature):
    """In outputs and in the gradient of every weight and of x."""
    seen = None if causal else Bidirectional()
    mixer = moved(LinearAttention(12, 3, 5, bias=True, visibility=seen, feature=feature).double())
    made = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 12, dtype=torch.float64, generator=made, requires_grad=True)
    documents = torch.tensor([[1] * 4 + [2] * 5, [0] * 2 + [1] * 6 + [3]]) if packed else None
    at = Pass(0, 9, documents=documents)
    wanted, found = definition(mixer, x, causal, documents), mixer(x, at)
    torch.testing.assert_close(found, wanted)
    over = [x, *mixer.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad(found.sin().sum(), over), torch.autograd.grad(wanted.sin().sum(), over), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_the_feature_is_elu_plus_one():
    x = torch.tensor([-200.0, -20.0, -1.0, 0.0, 0.5, 30.0], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(positive(x), F.elu(x) + 1)
    assert torch.autograd.gradcheck(positive, (x[[1, 2, 4, 5]],))
    small = positive(torch.tensor(-30.0))  # elu(x) + 1 has no digit of it left
    torch.testing.assert_close(small, torch.tensor(-30.0).exp()) and small > 0


def test_a_head_may_weigh_nothing():
    """Features too small for fp32 leave no quotient, and no NaN."""
    mixer = LinearAttention(8, 1)
    with torch.no_grad():
        mixer.qkv.weight.mul_(1e4)
    x = torch.randn(1, 7, 8, requires_grad=True)
    mixer(x).sum().backward()
    assert mixer(x).isfinite().all() and x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("feature", ["elu", "identity"])
def test_linear_attention_state_continues_and_rewinds(feature: Feature):
    """Read in pieces that end within chunks, taken back, and read on: as if read at once."""
    mixer, s = moved(LinearAttention(16, 2, feature=feature).double()).eval(), CHUNK + 9
    x = torch.randn(2, s, 16, dtype=torch.float64)
    with torch.no_grad():
        full, memory = mixer(x), mixer.init_state(2, s, torch.float64, rewind=3)
        for first, last in ((0, 5), (5, CHUNK + 1), (CHUNK + 1, s)):
            torch.testing.assert_close(mixer(x[:, first:last], Pass(first, last), memory), full[:, first:last])
        memory.truncate(s - 3)
        torch.testing.assert_close(mixer(x[:, s - 3 :], Pass(s - 3, s), memory), full[:, s - 3 :])
    assert memory.nbytes == 2 * 4 * 2 * 8 * (9 if feature == "elu" else 8) * 8  # rows, ring, heads, K, V + 1, bytes


def test_without_features_weights_are_products_over_the_number_of_tokens():
    model = gf.preset(f"llama@1m+{SIZE}+linear_attention+mixer.feature=identity").build(seed=0).eval()
    tokens, sites = torch.arange(20)[None], [f"layers.1.mixer.{name}" for name in ("q", "k", "effective_attention")]
    q, k, seen = capture(model, tokens, sites).values()
    wanted = torch.einsum("bsnh,btnh->bnst", q, k).tril() / torch.arange(1, 21)[:, None]
    torch.testing.assert_close(seen, wanted)


def test_linear_attention_state_has_one_size_and_inherits_heads():
    config = gf.preset(f"llama@1m+{SIZE}+linear_attention")
    assert config.state_bytes(10, torch.bfloat16) == config.state_bytes(10_000, torch.bfloat16) == 2 * 4 * 8 * 9 * 4
    assert [block.mixer.heads(config.ctx).n_heads for block in config.layers()] == [4, 4]
    alone = gf.preset(f"llama@1m+{SIZE}+mamba+linear_attention")
    assert next(alone.layers()).mixer.heads(alone.ctx) == (1, 1, 32)  # mamba has no heads to take


def test_linear_attention_refuses_unsupported_settings():
    for change, field in (("window:8", "mixer.visibility"), ("mup", "mup"), ("gqa:2", "mixer.n_kv_heads"),
                          ("mixer.n_heads=3", "n_heads")):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            gf.preset(f"llama@1m+{SIZE}+linear_attention+{change}").build()
        assert field in str(caught.value.field), change
    encoder = gf.preset(f"llama@1m+{SIZE}+linear_attention+bidirectional").build()
    with refused(code="conflict", field="mixer.visibility"):
        encoder.init_state(1, 8)
    with pytest.raises(RequestError):
        gf.generate(encoder, tokens=torch.arange(4)[None], max_new_tokens=2)


def test_effective_attention_is_captured_by_head():
    model = gf.preset(f"llama@1m+{SIZE}+linear_attention").build(seed=0).eval()
    tokens, site = torch.arange(20)[None], "layers.1.mixer.effective_attention"
    seen = capture(model, tokens, site)[site]
    torch.testing.assert_close(seen.sum(-1), torch.ones(1, 4, 20))
    found = lens.attention_map(model, tokens, layer=1, head=3)
    torch.testing.assert_close(found.weights, seen[0, 3] / seen[0, 3].max())
    assert str(found).startswith("layer 1, head 3, over 1")
    one = capture(model, tokens, site, heads=2)[site]
    torch.testing.assert_close(one, seen[:, 2:3])
    with refused(code="conflict", field="mixer.effective_attention"), edit(model, {site: lambda x: x}):
        model(tokens)
