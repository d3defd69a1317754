"""Mixers side by side: their sum, and states that are theirs."""

from __future__ import annotations

import pytest
import torch

import glassformer as gf
from glassformer.config import Stage
from glassformer.introspection import capture
from glassformer.model import Model
from glassformer.parts.core.cost import Shape
from glassformer.parts.mixer import AttentionConfig, Beside, BesideConfig, Mamba2Config, SharedAttentionConfig
from glassformer.parts.visibility import BidirectionalConfig
from glassformer.training.objectives import PrefixObjectiveConfig
from tests.refused import refused

SIZE = "layers=2+d_model=32+heads=4+vocab_size=61+context=64"


def built(expression: str) -> Model:
    model = gf.preset(expression).build(seed=0).eval()
    made = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=made), alpha=0.05)
    return model


def tokens(b: int, s: int) -> torch.Tensor:
    return torch.randint(61, (b, s), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("other", ["mamba2", "gated_deltanet", "s4", "mamba"])
def test_parallel_mixers_add_their_outputs(other: str):
    model = built(f"llama@1m+{SIZE}+beside:{other}")
    mixer, x = model.layers[0].mixer, torch.randn(2, 9, 32)
    assert isinstance(mixer, Beside)
    torch.testing.assert_close(mixer(x), mixer.mixers[0](x) + mixer.mixers[1](x))
    config = model.config
    assert config is not None and config.num_params() == sum(weight.numel() for weight in model.parameters())
    seen = capture(model, tokens(1, 9), ["layers.0.mixer.mixers.0.pattern", "layers.1.mixer.out"])
    assert seen["layers.0.mixer.mixers.0.pattern"].shape == (1, 4, 9, 9)


@pytest.mark.parametrize("window", ["", "+window:5"])
def test_decoding_is_the_full_pass(window: str):
    """In pieces, in rows of other lengths that come and go, reordered, and taken back."""
    model, text = built(f"llama@1m+{SIZE}+beside:mamba2{window}"), tokens(3, 16)
    config = model.config
    assert config is not None
    with torch.no_grad():
        full, state = model(text), model.init_state(3, 20, rewind=3)
        parts = torch.cat([model(part, state) for part in text.split([7, 1, 1, 4, 3], dim=1)], dim=1)
        torch.testing.assert_close(parts, full, rtol=1e-4, atol=1e-5)
        state.truncate(14)
        torch.testing.assert_close(model(text[:, 14:], state), full[:, 14:], rtol=1e-4, atol=1e-5)
        index = torch.tensor([2, 0, 0])
        state.reorder(index)
        more = tokens(3, 2)
        wanted = model(torch.cat([text[index], more], dim=1))[:, 16:]
        torch.testing.assert_close(model(more, state), wanted, rtol=1e-4, atol=1e-5)
        alone, batch = model.init_state(1, 20), model.init_state(2, 20)
        model(text[:1, :5], alone)
        batch.put(1, alone)
        other = model.init_state(1, 20)
        model(text[1:2, :3], other)
        batch.put(0, other)
        batch.spread([3, 5])
        together = model(torch.stack([text[1, 3:5], text[0, 5:7]]), batch)
        torch.testing.assert_close(together[0], full[1, 3:5], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together[1], full[0, 5:7], rtol=1e-4, atol=1e-5)
    for dtype in (torch.float32, torch.int8):
        assert model.init_state(2, 16, dtype).nbytes == 2 * config.state_bytes(16, dtype)


def test_packed_documents_stay_apart_and_the_past_is_the_past():
    model, text = built(f"gpt2@1m+{SIZE}+beside:gated_deltanet"), tokens(2, 12)
    documents = torch.repeat_interleave(torch.tensor([4, 9, 2]), torch.tensor([5, 1, 6])).expand(2, -1)
    with torch.no_grad():
        packed = model(text, documents=documents)
        apart = torch.cat([model(part) for part in text.split([5, 1, 6], dim=1)], dim=1)
        torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-5)
        changed = text.clone()
        changed[:, 7] = (changed[:, 7] + 1) % 61
        assert torch.equal(model(changed)[:, :7], model(text)[:, :7])


def test_how_it_is_named():
    config = gf.preset("llama@1m+beside:mamba2")
    mixer = next(config.layers()).mixer
    assert isinstance(mixer, BesideConfig) and [one.kind for one in mixer.mixers] == ["attention", "mamba2"]
    three = next(gf.preset("llama@1m+beside:mamba2+beside:s4+gqa:2").layers()).mixer
    assert [one.kind for one in three.mixers] == ["attention", "mamba2", "s4"]
    assert three.mixers[0].n_kv_heads == 2
    assert gf.preset("mamba@1m+beside:mamba") == gf.preset("mamba@1m")
    assert type(config).from_dict(config.to_dict()) == config
    for expression, code, field in (
        ("llama@1m+beside:rope", "unknown", "beside"),
        ("llama@1m+beside:gqa:2", "unknown", "beside"),
        ("llama@1m+beside", "missing", "beside"),
        ("llama@1m+beside:mamba2:3", "range", "mamba2"),
        ("mamba@1m+beside:s4+gqa:2", "unsupported", "mixer.n_kv_heads"),
    ):
        with refused(code=code, field=field):
            gf.preset(expression)
    with refused(code="range", field="mixer.mixers"):
        Beside([])


def test_one_of_them_may_take_anothers_keys():
    """Keys come from a layer below, or from the previous mixer of the layer; the reuser keeps no state, and decoding
    equals the full pass."""
    plain = gf.preset(f"llama@1m+{SIZE}")
    block = next(plain.layers())
    own = block.mixer.replace(shares="kv")
    assert isinstance(own, AttentionConfig)
    taker = SharedAttentionConfig(n_heads=4, position=own.position)
    for mixers in ((own, BesideConfig(mixers=(taker, Mamba2Config()))), (BesideConfig(mixers=(own, taker)), own)):
        blocks = tuple(block.replace(mixer=mixer) for mixer in mixers)
        config = plain.replace(stack=(Stage(blocks=blocks),))
        model, text = config.build(seed=0).eval(), tokens(2, 9)
        with torch.no_grad():
            full, state = model(text), model.init_state(2, 12, rewind=2)
            parts = torch.cat([model(part, state) for part in text.split([5, 1, 3], dim=1)], dim=1)
            torch.testing.assert_close(parts, full, rtol=1e-4, atol=1e-5)
            state.truncate(7)
            state.reorder(torch.tensor([1, 1]))
            torch.testing.assert_close(model(text[1:, 7:].expand(2, -1), state)[0], full[1, 7:], rtol=1e-4, atol=1e-5)
        wanted = config.costs(Shape(2, 1, 12, "decode", torch.float32)).state_bytes
        assert model.init_state(2, 12).nbytes == wanted


def test_prefix_is_accepted_if_no_other_mixer_looks_ahead():
    """By mixers side by side, if the others are causal, and by layers that take another's keys."""
    taking = gf.preset(f"llama@1m+{SIZE}+prefix")
    block = next(taking.layers())
    owner = block.replace(mixer=block.mixer.replace(shares="kv"))
    sharing = {name: getattr(block.mixer, name) for name in ("n_heads", "n_kv_heads", "position", "visibility")}
    taker = block.replace(mixer=SharedAttentionConfig(**sharing))
    shared = taking.replace(stack=(Stage(blocks=(owner, taker)),))
    both_ways = block.mixer.replace(visibility=BidirectionalConfig())
    mixed = taking.replace(stack=(Stage(blocks=(block.replace(mixer=BesideConfig(mixers=(block.mixer, both_ways))),)),))
    for config, takes in (
        (gf.preset(f"llama@1m+{SIZE}+prefix+beside:mamba2"), True), (shared, True), (mixed, False),
        (gf.preset(f"llama@1m+{SIZE}+beside:mamba2"), False),
    ):  # fmt: skip
        assert config.takes_prefix is takes
    for config in (gf.preset(f"llama@1m+{SIZE}+prefix+beside:mamba2"), shared):
        PrefixObjectiveConfig().check(config)
        model, text = config.build(seed=0).double().eval(), tokens(1, 9)
        front = torch.arange(9)[None] < 4
        first, later = text.clone(), text.clone()
        first[:, 3] = (first[:, 3] + 1) % 61
        later[:, 4] = (later[:, 4] + 1) % 61
        plain, of_first, of_later = (model(one, global_tokens=front)[0] for one in (text, first, later))
        assert (plain != of_first).any(1).all()  # a prefix is seen whole
        assert torch.equal(plain[:4], of_later[:4]) and (plain != of_later).any(1)[4:].all()
