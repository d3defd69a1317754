"""Keys and values of one layer, read by others: against the formula, the published class, and decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention, Gemma4TextRotaryEmbedding

import glassformer as gf
from glassformer.config import ModelConfig, Stage
from glassformer.errors import RequestError
from glassformer.introspection import capture
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import NaiveConfig
from glassformer.parts.mixer import Attention, AttentionConfig, QKNormConfig, SharedAttention, SharedAttentionConfig
from glassformer.parts.norm import RMSNorm, RMSNormConfig
from glassformer.parts.position import AlibiConfig, Rotary, RotaryConfig
from glassformer.parts.visibility import CausalConfig, SlidingWindowConfig
from tests.refused import refused

VOCAB, S = 61, 14
ROPE = RotaryConfig()


def moved(module: Any, seed: int = 0) -> Any:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw) * 0.3 + (weight.dim() == 1))
    return module.eval()


def config_of(owner: dict[str, Any] | None = None, taker: dict[str, Any] | None = None, **both: Any) -> ModelConfig:
    """Six layers: one that shares, one that takes; again; and two of another name, within a window."""
    plain = gf.preset(f"llama@1m+d_model=32+heads=4+vocab_size={VOCAB}+context=64")
    block = next(plain.layers())
    sizes: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "position": ROPE, "kernel": NaiveConfig(), **both}
    near = {"visibility": SlidingWindowConfig(window=5)}
    mixers = [
        AttentionConfig(shares="kv", **{**sizes, **(owner or {})}),
        SharedAttentionConfig(**{**sizes, **(taker or {})}),
        AttentionConfig(shares="near", **{**sizes, **near}),
        SharedAttentionConfig(source="near", q_norm=RMSNormConfig(), **{**sizes, **near}),
    ]
    blocks = tuple(block.replace(mixer=mixer) for mixer in mixers)
    return plain.replace(stack=(Stage(repeat=2, blocks=blocks[:2]), Stage(blocks=blocks[2:])))


def draw(b: int, s: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (b, s), generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, b.detach().abs().max().item()))


def test_a_layer_attends_to_the_keys_of_the_one_below():
    """The formula, with gradients of both layers' inputs and weights."""
    owner = moved(Attention(16, 4, 2, position=Rotary(4), shares="kv"))
    taker = moved(SharedAttention(16, 4, 2, position=Rotary(4)), 1)
    below, x = torch.randn(2, S, 16, requires_grad=True), torch.randn(2, S, 16, requires_grad=True)
    weights = [below, x, owner.qkv.weight, taker.q_proj.weight, taker.output.weight]
    pass_ = Pass.of(x)
    owner(below, pass_)
    y = taker(x, pass_)
    q = (x @ taker.q_proj.weight.T).unflatten(-1, (4, 4))
    k, v = ((below @ w.T).unflatten(-1, (2, 4)) for w in owner.qkv.weight.split([16, 8, 8])[1:])
    q, k = Rotary(4)(q, k, Pass.of(x))
    k, v = (each.repeat_interleave(2, 2) for each in (k, v))
    scores = torch.einsum("bsnh,btnh->bnst", q, k) / 2
    scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), float("-inf"))
    wanted = torch.einsum("bnst,btnh->bsnh", scores.softmax(-1), v).flatten(2) @ taker.output.weight.T
    close(y, wanted)
    probe = torch.randn(y.shape)
    for a, b in zip(*(torch.autograd.grad((z * probe).sum(), weights) for z in (y, wanted)), strict=True):
        close(a, b)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_the_published_class_computes_the_same(kind: str):
    """Gemma 4's layers, without the norm of values that no part has here."""
    theirs = Gemma4TextConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=6, global_head_dim=6,
        num_hidden_layers=4, num_kv_shared_layers=2, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2, attn_implementation="eager",
        rope_parameters={name: {"rope_type": "default", "rope_theta": 1e4}
                         for name in ("sliding_attention", "full_attention")},
    )  # fmt: skip
    at = theirs.layer_types.index(kind)
    one, other = (moved(Gemma4TextAttention(theirs, layer), layer) for layer in (at, at + 2))
    one.v_norm = nn.Identity()
    norm, window = QKNormConfig(norm=RMSNormConfig(eps=1e-6)), 5 if kind == "sliding_attention" else None
    seen = CausalConfig() if window is None else SlidingWindowConfig(window=window)
    plain = gf.preset("llama@1m+d_model=24+heads=4").ctx
    own = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=6, position=ROPE, qk_norm=norm, scale=1.0, shares="kv",
                          visibility=seen)  # fmt: skip
    taking = SharedAttentionConfig(n_heads=4, n_kv_heads=2, head_dim=6, position=ROPE, q_norm=norm.norm, scale=1.0,
                                   visibility=seen)  # fmt: skip
    owner, taker = own.build(plain), taking.build(plain)
    with torch.no_grad():
        owner.qkv.weight.copy_(torch.cat([one.q_proj.weight, one.k_proj.weight, one.v_proj.weight]))
        owner.qk_norm.q_norm.weight.copy_(one.q_norm.weight)
        owner.qk_norm.k_norm.weight.copy_(one.k_norm.weight)
        owner.output.weight.copy_(one.o_proj.weight)
        taker.q_proj.weight.copy_(other.q_proj.weight)
        taker.q_norm.weight.copy_(other.q_norm.weight)
        taker.output.weight.copy_(other.o_proj.weight)
    below, x = torch.randn(2, S, 24, requires_grad=True), torch.randn(2, S, 24, requires_grad=True)
    angles = Gemma4TextRotaryEmbedding(theirs)(x, torch.arange(S)[None], kind)
    ahead = torch.arange(S)[:, None] - torch.arange(S)
    mask = torch.zeros(S, S).masked_fill((ahead < 0) | (ahead >= (window or S)), float("-inf"))
    shared: dict[str, Any] = {}
    wanted = [layer(input_, angles, mask, shared)[0] for layer, input_ in ((one, below), (other, x))]
    pass_ = Pass.of(x)
    got = [owner(below, pass_), taker(x, pass_)]
    probe = torch.randn(2, 2, S, 24)
    for mine, their in zip(got, wanted, strict=True):
        close(mine, their)
    ours, theirs_ = (torch.autograd.grad(sum((y * p).sum() for y, p in zip(ys, probe, strict=True)), [below, x])
                     for ys in (got, wanted))  # fmt: skip
    for a, b in zip(ours, theirs_, strict=True):
        close(a, b)


@pytest.mark.parametrize("kernel", ["naive", "auto", "sdpa", "banded"])
def test_kv_reusers_keep_no_state(kernel: str):
    model = moved(config_of().build())
    config = gf.naming.assign(model.config, "kernel", kernel)
    fast = config.build().eval()
    fast.load_state_dict(model.state_dict())
    tokens, documents = draw(2, S), torch.tensor([[0] * 3 + [1] * (S - 3), [1] * S])
    with torch.no_grad():
        full = model(tokens)
        close(fast(tokens), full)
        state = fast.init_state(2, S)
        assert [layer is None for layer in state.layers] == [False, True] * 3
        assert state.nbytes == 2 * config.state_bytes(S, torch.float32) == 2 * (S + S + 5) * 2 * 2 * 8 * 4
        parts = [fast(part, state) for part in tokens.split([6, 1, 3, 1, 1, 2], 1)]
        close(torch.cat(parts, 1), full)
        state.reorder(torch.tensor([1, 0]))
        padded, state = fast(tokens, documents=documents), fast.init_state(2, S)
        close(padded[:1, 3:], model(tokens[:1, 3:]))
        first = fast(tokens[:, :7], state, documents=documents[:, :7])
        close(torch.cat([first, *(fast(part, state) for part in tokens[:, 7:].split(1, 1))], 1)[:, 3:], padded[:, 3:])


def test_it_counts_itself_and_every_parameter_learns():
    config = config_of()
    model = config.build()
    assert config.num_params() == sum(weight.numel() for weight in model.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(draw(1, S))
    assert counter.get_total_flops() == round(config.flops(S) * S)
    tokens = draw(3, S)
    model.loss(tokens, tokens.roll(-1, 1)).backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in model.parameters())
    seen = capture(model.eval(), tokens, "layers.1.mixer.*")
    pattern, v = seen["layers.1.mixer.pattern"], seen["layers.1.mixer.v"].repeat_interleave(2, 2)
    close(seen["layers.1.mixer.z"], torch.einsum("bnst,btnh->bsnh", pattern, v))


def test_a_model_with_shared_keys_is_saved_and_loaded(tmp_path: Any):
    model = moved(config_of().build())
    gf.save(model, None, tmp_path)
    assert torch.equal(gf.load(tmp_path).model(draw(1, S)), model(draw(1, S)))
    assert ModelConfig.from_dict(model.config.to_dict()) == model.config


@pytest.mark.parametrize(
    ("owner", "taker", "field"),
    [
        ({"n_kv_heads": 4}, {}, "mixer.n_kv_heads"),
        ({"head_dim": 6}, {}, "mixer.head_dim"),
        ({}, {"visibility": SlidingWindowConfig(window=5)}, "mixer.visibility"),
        ({}, {"position": AlibiConfig()}, "mixer.position"),
        ({}, {"source": "other"}, "layers.1.mixer"),
    ],
)
def test_layers_that_do_not_fit_are_refused(owner: dict[str, Any], taker: dict[str, Any], field: str):
    with pytest.raises(RequestError) as refused:
        config_of(owner, taker).check()
    assert refused.value.field == field


def test_a_pass_without_a_layer_that_shares_is_refused():
    with refused(code="missing", field="('keys', 'kv')"):
        SharedAttention(16, 4, q_norm=RMSNorm(4))(torch.randn(1, 3, 16))
