"""Latent attention against its formula, against its other form, and against the published classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

import glassformer as gf
from glassformer.errors import RequestError
from glassformer.introspection import capture
from glassformer.parts.forward_pass import Pass
from glassformer.parts.mixer import LatentAttention
from glassformer.parts.mixer.latent_attention import LatentShape
from glassformer.parts.position import Rotary
from glassformer.parts.visibility import SlidingWindow
from tests.refused import refused

TINY = "llama@1m+layers=2+d_model=32+heads=4+vocab_size=61+context=64"
S = 11


def moved(mixer: LatentAttention, seed: int = 0) -> LatentAttention:
    """Every parameter off its start."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw) * 0.4 + (weight.dim() == 1))
    return mixer


def make(form: Any = "auto", q_rank: int = 0, **more: Any) -> LatentAttention:
    rope = Rotary(4, pairing="interleaved")
    sizes = {"kv_rank": 10, "head_dim": 6, "rope_dim": 4, "value_dim": 5}
    return moved(LatentAttention(24, 3, **sizes, q_rank=q_rank, position=rope, form=form, **more))


def definition(mixer: LatentAttention, x: Tensor, window: int | None = None) -> Tensor:
    """Section 2.1 of the paper, an index at a time."""
    w = dict(mixer.named_parameters())

    def norm(y: Tensor, gain: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    def turn(y: Tensor, position: int) -> Tensor:
        angle = position * 1e4 ** -(torch.arange(0, 4, 2) / 4)
        a, b = y[..., 0::2], y[..., 1::2]
        turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
        return torch.stack(turned, -1).flatten(-2)

    made = []
    for row in x:
        down = norm(row @ w["q_down.weight"].T, w["q_norm.weight"]) if mixer.shape.q_rank else row
        c = norm(row @ w["kv_down.weight"][:10].T, w["kv_norm.weight"])
        zs = []
        for head in range(3):
            q = down @ w["q_up.weight"][10 * head : 10 * head + 10].T
            k_c = c @ w["kv_up.weight"][6 * head : 6 * head + 6].T
            v = c @ w["kv_up.weight"][18 + 5 * head : 18 + 5 * head + 5].T
            k_r = torch.stack([turn(y, i) for i, y in enumerate(row @ w["kv_down.weight"][10:].T)])
            q_r = torch.stack([turn(y, i) for i, y in enumerate(q[:, 6:])])
            scores = (q[:, :6] @ k_c.T + q_r @ k_r.T) / 10**0.5
            ahead = torch.arange(S)[:, None] - torch.arange(S)
            scores = scores.masked_fill((ahead < 0) | (ahead >= (window or S)), float("-inf"))
            zs.append(scores.softmax(-1) @ v)
        made.append(torch.cat(zs, -1) @ w["output.weight"].T)
    return torch.stack(made)


def graded(mixer: LatentAttention, y: Tensor, x: Tensor) -> list[Tensor]:
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    return list(torch.autograd.grad((y * probe).sum(), [x, *mixer.parameters()]))


@pytest.mark.parametrize("window", [None, 4], ids=["all", "window"])
@pytest.mark.parametrize("q_rank", [0, 7])
def test_both_forms_are_the_papers(q_rank: int, window: int | None):
    x = torch.randn(2, S, 24, generator=torch.Generator().manual_seed(1), requires_grad=True)
    seen = SlidingWindow(window) if window else None
    oracle = make(q_rank=q_rank)
    y = definition(oracle, x, window)
    wanted = graded(oracle, y, x)
    for form in ("expanded", "absorbed", "auto"):
        mixer = make(form, q_rank, visibility=seen)
        torch.testing.assert_close(mixer(x), y, rtol=1e-5, atol=1e-5)
        for got, want in zip(graded(mixer, mixer(x), x), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("window", [None, 4], ids=["all", "window"])
def test_latent_state_serves_both_forms(window: int | None):
    x = torch.randn(2, S, 24)
    seen = SlidingWindow(window) if window else None
    with torch.no_grad():
        full = make(visibility=seen)(x)
        for form in ("auto", "expanded", "absorbed"):
            mixer = make(form, visibility=seen)
            state = mixer.init_state(2, S, torch.float32)
            assert state.nbytes == 2 * (window or S) * (10 + 4) * 4
            pieces = [mixer(x[:, a:b], Pass(a, b), state) for a, b in ((0, 4), (4, 5), (5, 8), (8, 9), (9, S))]
            torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=1e-5, atol=1e-5)


def test_decoding_makes_no_keys():
    """A step's products grow with the latent's width, and not with that of all heads' keys and values."""
    model = gf.preset(f"{TINY}+layers=1+mla:16+mixer.head_dim=64+mixer.value_dim=64+kernel=naive").build().eval()
    state = model.init_state(1, 64)
    tokens = torch.randint(61, (1, 64))
    with torch.no_grad():
        model(tokens[:, :63], state)
        with FlopCounterMode(display=False) as counter:
            model(tokens[:, 63:], state)
    assert counter.get_total_flops() == model.config.costs(gf.parts.core.cost.Shape(1, 1, 64, "decode")).flops
    assert counter.get_total_flops() < 2 * 64 * 16 * 4 * (64 + 64)  # the FLOPs of the expansion only


def test_the_form_follows_the_number_of_operations():
    shape = LatentShape(n=16, content=128, rope=64, value=128, kv_rank=512, q_rank=0)
    assert [shape.absorbs(s) for s in (1, 170, 171, 4096)] == [True, True, False, False]
    assert shape._replace(kv_rank=100).absorbs(1 << 20)  # a latent narrower than a key and a value


def class_of(version: int, q_rank: int | None) -> tuple[Any, Any, Any]:
    """(their attention, their config, positions -> what the attention takes)."""
    said = {
        "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": q_rank,
        "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
        "max_position_embeddings": 64, "attention_bias": True, "attn_implementation": "eager",
    }  # fmt: skip
    module = {2: v2, 3: v3}[version]
    config = {2: DeepseekV2Config, 3: DeepseekV3Config}[version](**said)
    own = {2: "DeepseekV2", 3: "DeepseekV3"}[version]
    return getattr(module, f"{own}Attention")(config, 0), config, getattr(module, f"{own}RotaryEmbedding")(config)


@pytest.mark.parametrize("q_rank", [None, 7])
@pytest.mark.parametrize("version", [2, 3])
def test_the_published_attention_computes_the_same(version: int, q_rank: int | None):
    theirs, _, rope = class_of(version, q_rank)
    mixer = make(q_rank=q_rank or 0, bias=True)
    maps = {"kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "output": "o_proj", "q_up": "q_proj"}
    if q_rank:
        maps |= {"q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj"}
    with torch.no_grad():
        for mine, name in maps.items():
            their = theirs.get_submodule(name)
            for leaf, weight in mixer.get_submodule(mine).named_parameters():
                getattr(their, leaf).copy_(weight)
        k, v = mixer.kv_up.weight.split([18, 15])
        theirs.kv_b_proj.weight.copy_(torch.cat([k.view(3, 6, 10), v.view(3, 5, 10)], 1).flatten(0, 1))
    x = torch.randn(2, S, 24, requires_grad=True)
    mask = torch.full((S, S), float("-inf")).triu(1)
    at = rope(x, torch.arange(S)[None])
    y = theirs(hidden_states=x, position_embeddings=at, attention_mask=mask)[0]
    torch.testing.assert_close(mixer(x), y, rtol=1e-5, atol=1e-5)
    probe = torch.randn(y.shape)
    (wanted,) = torch.autograd.grad((y * probe).sum(), x)
    (got,) = torch.autograd.grad((mixer(x) * probe).sum(), x)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_the_word_takes_over_heads_and_the_papers_shares():
    config = gf.preset("llama-3-8b+mla")
    mixer: Any = next(config.layers()).mixer
    assert mixer.shape(config.ctx) == LatentShape(32, 128, 64, 128, 512, 0)
    assert mixer.position.base == 5e5
    assert config.state_bytes(1) == 32 * (512 + 64) * 2
    with_queries: Any = mixer.replace(q_rank=None)
    assert with_queries.shape(config.ctx).q_rank == 1536
    grouped: Any = next(gf.preset("llama-3-8b").layers()).mixer
    assert grouped.n_kv_heads == 8 and mixer.heads(config.ctx).n_kv_heads == 32  # has no groups, as its docstring says
    with refused(code="conflict", field="mixer.n_kv_heads"):
        gf.preset("llama@1m+gqa:2+mla")


@pytest.mark.parametrize(
    ("change", "field"),
    [("gqa:2", "mixer.n_kv_heads"), ("mqa", "mixer.n_kv_heads"), ("mla:0", "mla"), ("mixer.rope_dim=3", None)],
)
def test_mla_with_unsupported_change_is_refused(change: str, field: str | None):
    with pytest.raises(RequestError) as refused:
        gf.preset(f"{TINY}+mla+{change}").check()
    assert field is None or refused.value.field == field
    gf.preset(f"{TINY}+mla+mha").check()


def test_widths_of_latents_have_no_rule_of_mup():
    with refused(code="conflict", field="mup"):
        gf.preset(f"{TINY}+mla+mup").check()
    with refused(code="conflict", field="mixer.kind"):
        gf.preset("mamba@1m+mla")


def test_mla_keys_are_captured_in_each_form_and_edited_in_expanded():
    tokens = torch.randint(61, (1, 9))
    model = gf.preset(f"{TINY}+mla").build().eval()
    plain = capture(model, tokens, "layers.0.mixer.*")
    for layer in model.layers:
        layer.mixer.form = "absorbed"  # type: ignore[assignment]
    absorbed = capture(model, tokens, "layers.0.mixer.*")
    for name in ("q", "k", "v", "latent", "scores", "pattern", "z", "out"):
        torch.testing.assert_close(absorbed[f"layers.0.mixer.{name}"], plain[f"layers.0.mixer.{name}"])
    k = model.layers[0].mixer.k
    assert isinstance(k, torch.nn.Module)
    with k.register_forward_hook(lambda *_: None), refused(code="unsupported", field="mixer.k"):
        model(tokens)
