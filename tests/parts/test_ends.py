"""The two ends of a model: tokens to vectors, vectors to a loss; and the small pieces between."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from glassformer.naming import preset
from glassformer.parts import loss as loss_module
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Shape
from glassformer.parts.core.site import Site
from glassformer.parts.embedding import Embedding
from glassformer.parts.forward_pass import Pass
from glassformer.parts.head import Head
from glassformer.parts.linear import Linear, linear_cost
from glassformer.parts.loss import linear_cross_entropy, naive_linear_cross_entropy
from glassformer.parts.mixer import Attention, AttentionConfig, QKNormConfig
from glassformer.parts.norm import LayerNorm, LayerNormConfig, RMSNormConfig
from glassformer.parts.position import Learned, Sinusoidal
from glassformer.parts.projection import FusedQKV
from glassformer.text.batches import Batch
from tests.refused import refused

TOKENS = torch.tensor([[1, 4, 2], [0, 0, 6]])


def test_embedding_looks_up_scales_adds_and_norms():
    norm, position = LayerNorm(8), Learned(5, 8)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(8))
    at = Pass(0, 3)
    plain = Embedding(7, 8)
    assert torch.equal(plain(TOKENS, at), plain.weight[TOKENS])
    scaled = Embedding(7, 8, scale=8**0.5)
    torch.testing.assert_close(scaled(TOKENS, at), scaled.weight[TOKENS] * 8**0.5)
    full = Embedding(7, 8, scale=3.0, norm=norm, position=position)
    expected = norm(full.weight[TOKENS] * 3.0 + position.weight[:3])
    torch.testing.assert_close(full(TOKENS, at), expected)
    fixed = Embedding(7, 8, position=Sinusoidal(8)).bfloat16()
    assert fixed(TOKENS, at).dtype == torch.bfloat16


def test_embedding_drops_only_while_training():
    embedding = Embedding(7, 8, dropout=0.5)
    assert (embedding.train()(TOKENS, Pass(0, 3)) == 0).any()
    assert torch.equal(embedding.eval()(TOKENS, Pass(0, 3)), embedding.weight[TOKENS])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_head_is_its_formula(tied: bool, bias: bool, cap: float | None, scale: float):
    head, embedding, x = Head(7, 8, tied, bias, cap, scale), Embedding(7, 8), torch.randn(2, 3, 8)
    if bias:
        torch.nn.init.normal_(head.bias)  # type: ignore[arg-type]
    logits = scale * x @ (embedding if tied else head).weight.T + (head.bias if bias else 0)  # type: ignore[union-attr, operator]
    expected = cap * torch.tanh(logits / cap) if cap else logits
    torch.testing.assert_close(head(x, embedding), expected)
    torch.testing.assert_close(head(x, embedding, TOKENS), F.cross_entropy(expected.flatten(0, 1), TOKENS.flatten()))
    assert sum(p.numel() for p in head.parameters()) == (0 if tied else 56) + (7 if bias else 0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize(("z_loss", "smoothing"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.2), (0.1, 0.2)])
@pytest.mark.parametrize("chunk", [1, 13, 40, 1 << 20])
def test_the_loss_is_the_definition_in_chunks_of_any_size(
    monkeypatch: pytest.MonkeyPatch, bias: bool, cap: float | None, chunk: int, z_loss: float, smoothing: float
):
    monkeypatch.setattr(loss_module, "_LEAST_ROWS", 1)
    monkeypatch.setattr(loss_module, "_VALUES_PER_CHUNK", chunk)
    x, weight = torch.randn(11, 6, requires_grad=True), torch.randn(13, 6, requires_grad=True)
    b = torch.randn(13, requires_grad=True) if bias else None
    targets = torch.randint(0, 13, (11,))
    targets[[0, 5, 10]] = -100
    leaves = [leaf for leaf in (x, weight, b) if leaf is not None]
    both = linear_cross_entropy, naive_linear_cross_entropy
    mine, theirs = (f(x, weight, targets, b, cap, z_loss=z_loss, smoothing=smoothing) for f in both)
    torch.testing.assert_close(mine, theirs)
    for a, c in zip(torch.autograd.grad(3 * mine, leaves), torch.autograd.grad(3 * theirs, leaves), strict=True):
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-6)
    each = [f(x, weight, targets, b, cap, "none", z_loss, smoothing) for f in both]
    torch.testing.assert_close(*each)
    for a, c in zip(*(torch.autograd.grad(one.square().sum(), leaves) for one in each), strict=True):
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-6)


def test_the_loss_keeps_no_logits():
    """Only gradients of x and W wait for the backward pass."""
    x, weight = torch.randn(512, 4, requires_grad=True), torch.randn(4096, 4, requires_grad=True)
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear_cross_entropy(x, weight, torch.zeros(512, dtype=torch.long))
    assert kept and max(kept) <= 4096 * 4


def test_huge_logits_have_a_loss():
    x, weight = (
        torch.full((2, 1), 1e4, requires_grad=True),
        torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True),
    )
    value = linear_cross_entropy(x, weight, torch.tensor([0, 1]))
    assert value.item() == pytest.approx(1e4)
    value.backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_linear_stacks_maps_that_share_their_input():
    linear, x = Linear(5, (4, 2, 3), bias=True), torch.randn(2, 5)
    torch.nn.init.normal_(linear.bias)  # type: ignore[arg-type]
    parts = linear.split(linear(x))
    assert [part.shape for part in parts] == [(2, 4), (2, 2), (2, 3)]
    torch.testing.assert_close(parts[1], x @ linear.weight[4:6].T + linear.bias[4:6])  # type: ignore[index]
    ctx = BuildContext(5, 7, 8, 1)
    assert linear_cost(ctx, Shape(), 5, 9, bias=True).parameters == sum(p.numel() for p in linear.parameters())
    assert Linear(5, 9).bias is None and linear_cost(ctx, Shape(), 5, 9).parameters == 45


def test_a_site_is_the_identity():
    site, x = Site("name"), torch.randn(3)
    assert site(x) is x and not site.watched and not list(site.parameters())
    hook = site.register_forward_hook(lambda module, args, value: value + 1)
    assert site.watched and torch.equal(site(x), x + 1)
    hook.remove()
    assert site(x) is x


def test_attention_without_config_equals_its_formula():
    """A part is usable without a config or positions: plain torch, head by head."""
    attention, x = Attention(12, n_heads=4, n_kv_heads=2, bias=True), torch.randn(2, 5, 12)
    q, k, v = attention.qkv(x).split((12, 6, 6), -1)
    out = []
    for i in range(4):
        j = i // 2
        a = q[..., 3 * i : 3 * i + 3] @ k[..., 3 * j : 3 * j + 3].transpose(1, 2) / 3**0.5
        a = a.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf")).softmax(-1)
        out.append(a @ v[..., 3 * j : 3 * j + 3])
    torch.testing.assert_close(attention(x), attention.output(torch.cat(out, -1)))
    scaled = Attention(12, 4, scale=0.1)
    assert scaled.scale == 0.1 and Attention(12, 4, head_dim=5).output.weight.shape == (12, 20)


def test_attention_clips_q_k_and_v():
    clipped = Attention(12, 4, bias=True, projection=partial(FusedQKV, clip=0.3))
    plain, x = Attention(12, 4, bias=True), torch.randn(2, 5, 12)
    plain.load_state_dict(clipped.state_dict())
    assert not torch.allclose(plain(x), clipped(x))
    plain.qkv.register_forward_hook(lambda module, args, qkv: qkv.clamp(-0.3, 0.3))
    torch.testing.assert_close(clipped(x), plain(x))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_qk_norm_over_each_head_equals_separate_norms(kind: str):
    """Against torch's norms, one for each head of q and of k."""
    norm = LayerNormConfig(eps=1e-3, bias=False) if kind == "layernorm" else RMSNormConfig(eps=1e-3)
    config = QKNormConfig(norm=norm, over="each_head")
    ctx = BuildContext(d_model=24, vocab_size=7, context=8, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6)
    mine = config.build(ctx)
    assert config.costs(ctx, Shape()).parameters == sum(p.numel() for p in mine.parameters()) == 36
    for weight in mine.parameters():
        torch.nn.init.normal_(weight)
    given = torch.randn(3, 5, 4, 6), torch.randn(3, 5, 2, 6)
    oracle = F.layer_norm if kind == "layernorm" else F.rms_norm
    for x, y, weights in zip(given, mine(*given, Pass(0, 5)), mine.parameters(), strict=True):
        heads = [oracle(x[:, :, i], (6,), weight, eps=1e-3) for i, weight in enumerate(weights)]
        torch.testing.assert_close(y, torch.stack(heads, 2))


def test_attention_refuses_heads_that_do_not_divide():
    """The module itself refuses too, since a part may be used without its config."""
    for heads, kv, field in ((5, None, "n_heads"), (4, 3, "n_kv_heads")):
        with refused(code="range", field=field):
            Attention(12, heads, kv)


def test_attention_config_sentences():
    ctx = BuildContext(d_model=12, vocab_size=3, context=8, n_layers=1)
    for config, code, field in (
        (AttentionConfig(n_heads=6, n_kv_heads=4), "range", "n_kv_heads"),
        (AttentionConfig(n_heads=5), "range", "n_heads"),
    ):
        with refused(code=code, field=field):
            config.build(ctx)


def test_attention_drops_only_while_training():
    model = preset("llama@1m+layers=1+d_model=16+heads=2+vocab_size=7+context=8+mixer.dropout=0.5").build()
    x = torch.tensor([[1, 2, 3, 4]])
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


@pytest.mark.parametrize("change", ["", "+tied", "+z_loss=0.1", "+head.softcap=5", "+head.smoothing=0.1", "+moe:4:2"])
def test_targets_that_are_all_ignored_give_gradients_of_zero(change: str) -> None:
    """Like torch's cross_entropy, whose mean over nothing is NaN."""
    model = preset(f"llama@0.3m+layers=1+vocab_size=61{change}").build(seed=0)
    tokens = torch.randint(0, 61, (2, 12))
    loss = model.loss(tokens, torch.full_like(tokens, -100))
    loss.backward()
    logits = torch.zeros(2, 5, requires_grad=True)
    theirs = torch.nn.functional.cross_entropy(logits, torch.full((2,), -100))
    assert loss.isnan() and theirs.isnan()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and "router" not in name}
    assert grads and all(grad.isfinite().all() for grad in grads.values())
    if "moe" not in change:  # experts have a second loss, their balance
        assert all((grad == 0).all() for grad in grads.values())


def test_a_piece_without_targets_adds_nothing_to_a_step() -> None:
    tokens = torch.arange(16).view(4, 4)
    targets = tokens.clone()
    targets[:2] = -100
    assert [share for _, share in Batch(tokens, targets).pieces(2)] == [0.0, 1.0]
    assert [share for _, share in Batch(tokens, torch.full_like(tokens, -100)).pieces(2)] == [0.0, 0.0]
