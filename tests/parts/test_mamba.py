"""The selective scan against its definition, closed forms and loops; the mixer's states, maps and beginnings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import glassformer as gf
from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.introspection import capture, edit
from glassformer.model import Model
from glassformer.parts.forward_pass import Pass
from glassformer.parts.mixer import Mamba, MambaConfig
from glassformer.parts.mixer.mamba import ShortConv
from glassformer.parts.mixer.scan import CHUNK, effective_attention, naive_scan, selective_scan, states
from glassformer.parts.mup import parameter_groups
from glassformer.parts.region import compiled_regions
from tests.refused import refused

Scan = dict[str, Any]


def draw(b: int, s: int, c: int, p: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Scan:
    """Inputs of a scan: steps as large as trained models have them, decays from almost 0 to almost 1."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=dtype)

    return {
        "u": normal(b, s, c), "dt": normal(b, s, c).exp() / 4, "a": -normal(p, c).exp() * 4,
        "b": normal(b, s, p), "c": normal(b, s, p), "h": normal(b, p, c),
    }  # fmt: skip


def starts(b: int, s: int, seed: int) -> Tensor:
    return torch.rand(b, s, generator=torch.Generator().manual_seed(seed)) < 0.2


# The scan


@given(st.integers(1, 3), st.integers(1, 3 * CHUNK + 2), st.integers(1, 4), st.integers(1, 5), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_fast_scan_is_the_definition(b: int, s: int, c: int, p: int, cut: bool):
    """Outputs, the last state, and every gradient are equal for any sequence starts."""
    given, fresh = draw(b, s, c, p, seed=s), starts(b, s, s) if cut else None
    wanted, found = ({name: x.clone().requires_grad_() for name, x in given.items()} for _ in range(2))
    (y, h), (z, g) = naive_scan(**wanted, fresh=fresh), selective_scan(**found, fresh=fresh)
    torch.testing.assert_close(z, y)
    torch.testing.assert_close(g, h)
    (z.sin().sum() + g.cos().sum()).backward()
    (y.sin().sum() + h.cos().sum()).backward()
    for name in given:
        torch.testing.assert_close(found[name].grad, wanted[name].grad, msg=name)


def test_its_gradient_is_the_slope():
    given, fresh = draw(2, CHUNK + 3, 3, 2), starts(2, CHUNK + 3, 1)
    for x in given.values():
        x.requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: selective_scan(*x, fresh=fresh), tuple(given.values()))


@pytest.mark.parametrize("s", [1, 2, CHUNK, CHUNK + 1, 50])
def test_constant_inputs_sum_a_geometric_series(s: int):
    """h_s = x (1 - q^s) / (1 - q) of q = exp(dt a) and x = dt u b."""
    dt, a, u, b, c = 0.3, -1.5, 0.7, 2.0, 3.0
    one = torch.ones(1, s, 1, dtype=torch.float64)
    rate, zero = torch.full((1, 1), a, dtype=torch.float64), torch.zeros(1, 1, 1, dtype=torch.float64)
    y, h = selective_scan(u * one, dt * one, rate, b * one, c * one, zero)
    q = math.exp(dt * a)
    sums = torch.tensor([dt * u * b * (1 - q**t) / (1 - q) for t in range(1, s + 1)], dtype=torch.float64)
    torch.testing.assert_close(y[0, :, 0], c * sums)
    torch.testing.assert_close(h.flatten()[0], sums[-1])


def test_no_step_is_too_long_and_none_too_short():
    """exp(dt A) runs from 1 to exactly 0: nothing overflows, and gradients are numbers."""
    given = draw(1, 40, 3, 2, dtype=torch.float32)
    given["dt"] = torch.tensor([0.0, 1e-30, 1.0, 1e30]).repeat(10)[None, :, None].expand(1, 40, 3).clone()
    given["u"] = given["u"] / given["dt"].clamp(min=1)
    for x in given.values():
        x.requires_grad_()
    y, h = selective_scan(**given)
    wanted, _ = naive_scan(**given)
    torch.testing.assert_close(y, wanted)
    (y.sum() + h.sum()).backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in given.values())


@pytest.mark.slow
@pytest.mark.skipif(not machine.can_compile("cpu"), reason="no compiler here")
def test_fused_it_is_the_definition(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("glassformer.parts.mixer.scan.CHUNK", 3)  # of one length, short: they compile in seconds
    given, fresh = draw(2, 9, 5, 2, dtype=torch.float32), starts(2, 9, 3)
    for x in given.values():
        x.requires_grad_()
    with compiled_regions():
        y, _ = selective_scan(**given, fresh=fresh)
        found = torch.autograd.grad(y.square().sum(), list(given.values()))
    z, _ = naive_scan(**given, fresh=fresh)
    torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found, torch.autograd.grad(z.square().sum(), list(given.values())), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


# What the scan does not store


@given(st.integers(1, 40), st.booleans())
@settings(max_examples=20, deadline=None)
def test_states_are_those_of_a_loop(s: int, cut: bool):
    given, fresh = draw(2, s, 3, 4, seed=s), starts(2, s, s) if cut else None
    h, wanted = given["h"], []
    for t in range(s):
        decay = torch.exp(given["dt"][:, t, None] * given["a"])
        if fresh is not None:
            decay = decay * ~fresh[:, t, None, None]
        h = decay * h + torch.einsum("bp,bc->bpc", given["b"][:, t], given["dt"][:, t] * given["u"][:, t])
        wanted.append(h.transpose(1, 2))
    blocks = dict(states(*(given[name] for name in ("u", "dt", "a", "b", "h")), fresh))
    torch.testing.assert_close(torch.cat(list(blocks.values()), dim=1), torch.stack(wanted, dim=1))


def map_of(given: Scan, t: int, j: int) -> Tensor:
    """The weight of u_j in y_t, (b, c), by the definition: the product of every decay between them."""
    decay = torch.ones_like(given["h"])
    for i in range(j + 1, t + 1):
        decay = decay * torch.exp(given["dt"][:, i, None] * given["a"])
    return torch.einsum("bp,bpc,bp,bc->bc", given["c"][:, t], decay, given["b"][:, j], given["dt"][:, j])


@pytest.mark.parametrize("rows", [1, 3, 128])
@pytest.mark.parametrize("cut", [False, True])
def test_effective_attention_is_the_product_of_all_between(rows: int, cut: bool, monkeypatch: pytest.MonkeyPatch):
    """In blocks of any height, and as the scan weighs u; nothing across the border of two sequences."""
    monkeypatch.setattr("glassformer.parts.mixer.scan.QUERIES_PER_BLOCK", rows)
    s, given = 13, draw(2, 13, 3, 4)
    age = torch.stack([torch.cat([torch.arange(5), torch.arange(8)]), torch.arange(13)]) if cut else None
    found = torch.cat(
        [block for _, block in effective_attention(given["dt"], given["a"], given["b"], given["c"], age)], 2
    )
    for t in range(s):
        for j in range(s):
            inside = torch.tensor([j <= t and (age is None or j >= t - int(age[row, t])) for row in range(2)])
            wanted = map_of(given, t, j) * inside[:, None]
            torch.testing.assert_close(found[:, :, t, j], wanted)
    fresh = None if age is None else age == 0
    y, _ = naive_scan(**{**given, "h": torch.zeros_like(given["h"])}, fresh=fresh)
    torch.testing.assert_close(torch.einsum("bcst,btc->bsc", found, given["u"]), y)


# The mixer


def tiny(changes: str = "mamba", seed: int = 0) -> Model:
    size = "layers=2+d_model=16+heads=2+vocab_size=31+context=64"
    return gf.preset(f"llama@1m+{size}+{changes}").build(seed=seed).eval()


def test_the_convolution_is_torchs():
    conv, x = ShortConv(5, 4).double(), torch.randn(2, 9, 5, dtype=torch.float64)
    theirs = nn.Conv1d(5, 5, 4, groups=5, padding=3).double()
    theirs.load_state_dict(conv.state_dict())
    torch.testing.assert_close(conv(x), theirs(x.transpose(1, 2))[..., :9].transpose(1, 2))
    torch.testing.assert_close(conv(x[:, 3:], x[:, :3]), conv(x)[:, 3:])
    apart = conv(x, None, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]))
    torch.testing.assert_close(apart, torch.cat([conv(x[:, :4]), conv(x[:, 4:])], dim=1))


def test_mamba_initial_weights_are_the_published_ones():
    """A = -1, ..., -p; D = 1; steps spread evenly in their logarithm; nothing but the matrices decays."""
    mixer = Mamba(512, dt_min=0.01, dt_max=0.05)
    torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 17.0).expand(1024, 16))
    steps = nn.functional.softplus(mixer.dt_proj.bias).log()  # type: ignore[arg-type]
    assert math.log(0.01) <= steps.min() + 1e-4 and steps.max() <= math.log(0.05) + 1e-4
    assert abs(steps.mean() - math.log(0.01 * 0.05) / 2) < 0.05
    decays = {id(weight) for weight in parameter_groups(mixer, 1.0, 0.1, {})[0]["params"]}
    assert {name for name, weight in mixer.named_parameters() if id(weight) in decays} == {
        f"{name}.weight" for name in ("in_proj", "x_proj", "dt_proj", "out_proj")
    }


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 7))
@settings(max_examples=20, deadline=None)
def test_mamba_state_continues_and_rewinds(sizes: list[int], rewind: int):
    """Read in any pieces, taken back by any number of tokens up to `rewind`, and read on: as if read at once."""
    mixer, s = Mamba(16).double().eval(), sum(sizes)
    x = torch.randn(2, s + 4, 16, dtype=torch.float64)
    with torch.no_grad():
        full, memory, read = mixer(x), mixer.init_state(2, s + 4, torch.float64, rewind=rewind), 0
        for size in sizes:
            piece = mixer(x[:, read : read + size], Pass(read, read + size), memory)
            torch.testing.assert_close(piece, full[:, read : read + size])
            read += size
        back = max(0, s - rewind)
        memory.truncate(back)
        torch.testing.assert_close(mixer(x[:, back:], Pass(back, s + 4), memory), full[:, back:])
    if s > rewind + 1:
        with refused(code="unsupported", field="length"):
            memory.truncate(1)


def test_right_padding_is_taken_back_or_refused():
    """Rows of different lengths are read together, padded on the right: the padding's effect on the state is undone if
    it can be."""
    model, lengths = tiny(), [3, 6, 5]
    tokens = torch.randint(31, (3, 6), generator=torch.Generator().manual_seed(0))
    more = torch.randint(31, (3, 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        state = model.init_state(3, 12, rewind=3)
        model(tokens, state)
        state.spread(lengths)
        together = torch.cat([model(part, state) for part in more.split([1, 2, 1], dim=1)], dim=1)
        for row, length in enumerate(lengths):
            alone = model(torch.cat([tokens[row, :length], more[row]])[None])
            torch.testing.assert_close(together[row : row + 1], alone[:, length:], rtol=1e-4, atol=1e-5)
        state = model.init_state(3, 12, rewind=2)
        model(tokens, state)
        with refused(code="unsupported", field="length"):
            state.spread(lengths)


def test_its_state_has_one_size_and_keeps_its_sum_in_fp32():
    model = tiny()
    assert (
        model.init_state(1, 10).nbytes
        == model.init_state(1, 10_000).nbytes
        == model.config.state_bytes(7, torch.float32)
    )
    for dtype in (torch.bfloat16, torch.int8):
        memory = model.init_state(1, 10, dtype).tensors()
        assert memory["0.inputs"].dtype == dtype and memory["0.h"].dtype == torch.float32
    assert model.double().init_state(1, 10).tensors()["0.h"].dtype == torch.float64
    tokens = torch.arange(9)[None]
    with torch.no_grad():  # a double model may keep less
        logits = torch.cat([model(part, state) for state in [model.init_state(1, 9, torch.float32)] for part in
                            tokens.split([5, 1, 3], dim=1)], dim=1)  # fmt: skip
    torch.testing.assert_close(logits, model(tokens), rtol=1e-4, atol=1e-5)


def test_channels_and_positions_are_computed_as_they_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    """One channel of a map costs one channel; without an observer no map is made."""
    from glassformer.parts.mixer import mamba

    asked: list[int] = []

    def counted(dt: Tensor, *rest: Any) -> Any:
        asked.append(dt.shape[-1])
        return effective_attention(dt, *rest)

    model, tokens = tiny(), torch.randint(31, (1, 20), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(mamba, "effective_attention", counted)
    site = "layers.1.mixer.effective_attention"
    with torch.no_grad():
        model(tokens)
    capture(model, tokens, "layers.*.mixer.z")
    assert not asked
    whole = capture(model, tokens, site)[site]
    some = capture(model, tokens, site, heads=[-1, 3], positions=[4, -1])[site]
    assert asked == [32, 2]
    torch.testing.assert_close(some, whole[:, [31, 3]][:, :, [4, 19]])
    pooled = capture(model, tokens, site, heads=5, pool=4)[site]
    torch.testing.assert_close(pooled, whole[:, 5:6].unflatten(3, (4, 5)).amax(-1).unflatten(2, (4, 5)).amax(3))
    with pytest.warns(UserWarning, match="pooled"):
        bounded = capture(model, tokens, site, memory=8192)[site]
    assert bounded.nbytes <= 8192


def test_a_long_text_of_one_channel_is_pooled_on_the_way():
    model, s = tiny("mamba+context=4096"), 4096
    tokens = torch.randint(31, (1, s), generator=torch.Generator().manual_seed(0))
    seen = capture(model, tokens, "layers.0.mixer.effective_attention", heads=0, pool=64)
    found = seen["layers.0.mixer.effective_attention"]
    assert found.shape == (1, 1, 64, 64) and not found[0, 0].triu(1).any() and found.isfinite().all()


def test_mamba_sites_that_are_only_read_refuse_edits():
    model, tokens = tiny(), torch.zeros(1, 4, dtype=torch.long)
    for name in ("state", "effective_attention"):
        with (
            edit(model, {f"layers.0.mixer.{name}": torch.zeros_like}),
            refused(code="unsupported", field=f"mixer.{name}"),
        ):
            model(tokens)
    with edit(model, {"layers.*.mixer.z": torch.zeros_like}), torch.no_grad():
        assert not capture(model, tokens, "layers.0.mixer.out")["layers.0.mixer.out"].any()


def test_a_map_does_not_reach_before_the_call():
    """With a state, keys are the tokens of the call; the site `state` continues from the tokens read before."""
    model, tokens = tiny(), torch.randint(31, (1, 12), generator=torch.Generator().manual_seed(0))
    whole = capture(model, tokens, "layers.0.mixer.*")
    memory = model.init_state(1, 12)
    capture(model, tokens[:, :7], "layers.0.mixer.u", state=memory)
    rest = capture(model, tokens[:, 7:], ["layers.0.mixer.state", "layers.0.mixer.effective_attention"], state=memory)
    torch.testing.assert_close(rest["layers.0.mixer.state"], whole["layers.0.mixer.state"][:, 7:], rtol=1e-4, atol=1e-6)
    theirs = whole["layers.0.mixer.effective_attention"][:, :, 7:, 7:]
    torch.testing.assert_close(rest["layers.0.mixer.effective_attention"], theirs, rtol=1e-4, atol=1e-6)


# Requests


@pytest.mark.parametrize(
    ("expression", "code", "field"),
    [
        ("mamba@1m+rope", "unsupported", "mixer.position"),
        ("mamba@1m+gqa:2", "unsupported", "mixer.n_kv_heads"),
        ("mamba@1m+mup", "conflict", "mup"),
        ("mamba@1m+mixer.d_conv=1", "range", "stack.0.blocks.0.mixer.d_conv"),
        ("mamba@1m+mixer.dt_min=1", "conflict", "stack.0.blocks.0.mixer.dt_min"),
        ("mamba@1m+mixer.d_inner=3", "unknown", "mixer.d_inner"),
        ("mamba@1m+mamba:2", "range", "mamba"),
    ],
)
def test_wrong_requests_are_refused_in_a_sentence(expression: str, code: str, field: str):
    with refused(code=code, field=field):
        gf.preset(expression)


def test_mamba_replaces_only_the_mixer_and_drops_positions():
    llama, mamba = gf.preset("llama@10m"), gf.preset("llama@10m+mamba")
    changed = {path.split(".mixer.")[-1] for path in llama.diff(mamba)}
    assert all(path.startswith("stack.0.blocks.0.mixer.") for path in llama.diff(mamba)) and "kind" in changed
    assert gf.preset("gpt2@1m+mamba").embedding.position is None  # the recurrence knows the order
    assert next(gf.preset("mamba@1m+bias+dropout:0.1").layers()).mixer == MambaConfig(bias=True)
    assert gf.preset("mamba@10m") == gf.preset("mamba-130m@10m")
    mixed = llama.replace(stack=gf.preset("llama@10m+mamba").stack + llama.stack)
    assert ModelConfig.from_dict(mixed.to_dict()) == mixed
