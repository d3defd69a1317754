"""Positions by their defining properties: dependence on distance only, closed forms, limits of length."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.naming import preset
from glassformer.parts.core.base import BuildContext
from glassformer.parts.forward_pass import Pass
from glassformer.parts.position import Alibi, Learned, LearnedConfig, Rotary, RotaryConfig, Sinusoidal, Temperature
from glassformer.parts.position.alibi import alibi_slopes
from glassformer.parts.position.rotary import Pairing, naive_turn
from tests.refused import refused

HEAD = 8
PAIRINGS = st.sampled_from(["half", "interleaved"])
VECTOR = st.integers(0, 2**31).map(lambda seed: torch.randn(HEAD, generator=torch.Generator().manual_seed(seed)))


def at(*positions: int) -> Pass:
    return Pass(0, len(positions), ids=torch.tensor(positions))


def turned(rotary: Rotary, x: Tensor, position: int) -> Tensor:
    """Returns x (h,) rotated as at `position`."""
    q, k = rotary(x.view(1, 1, 1, -1), x.view(1, 1, 1, -1), at(position))
    assert torch.equal(q, k)
    return q.flatten()


@given(
    VECTOR,
    VECTOR,
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 300),
    PAIRINGS,
    st.sampled_from([4, HEAD]),
)
def test_rotary_scores_depend_only_on_distance(q: Tensor, k: Tensor, m: int, n: int, by: int, pairing: str, dim: int):
    rotary = Rotary(HEAD, dim=dim, pairing=pairing)  # type: ignore[arg-type]
    here = turned(rotary, q, m) @ turned(rotary, k, n)
    there = turned(rotary, q, m + by) @ turned(rotary, k, n + by)
    torch.testing.assert_close(here, there, rtol=1e-3, atol=2e-3)


@given(VECTOR, st.integers(0, 100_000), PAIRINGS, st.sampled_from([2, 4, HEAD]), st.floats(2, 1e6))
def test_rotary_keeps_the_norm_and_unrotated_elements(x: Tensor, position: int, pairing: str, dim: int, base: float):
    rotary = Rotary(HEAD, base=base, dim=dim, pairing=pairing)  # type: ignore[arg-type]
    y = turned(rotary, x, position)
    torch.testing.assert_close(y.norm(), x.norm(), rtol=1e-4, atol=1e-5)
    assert torch.equal(y[dim:], x[dim:])
    assert torch.equal(turned(rotary, x, 0), x)


@given(VECTOR, st.integers(1, 500))
def test_rotary_turns_each_pair_by_its_angle(x: Tensor, position: int):
    """The formula of the paper, with complex numbers."""
    theta = torch.tensor([10000.0 ** (-2 * i / HEAD) for i in range(HEAD // 2)], dtype=torch.float64)
    spin = torch.polar(torch.ones_like(theta), position * theta)
    pairs = torch.complex(x[0::2].double(), x[1::2].double()) * spin
    expected = torch.stack((pairs.real, pairs.imag), -1).flatten().float()
    torch.testing.assert_close(turned(Rotary(HEAD, pairing="interleaved"), x, position), expected, rtol=1e-3, atol=1e-3)
    order = torch.cat((torch.arange(0, HEAD, 2), torch.arange(1, HEAD, 2)))
    half = turned(Rotary(HEAD, pairing="half"), x[order], position)
    torch.testing.assert_close(half, expected[order], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [4, HEAD])
def test_rotary_gradients_are_those_of_its_values(pairing: str, dim: int):
    rotary = Rotary(HEAD, dim=dim, pairing=pairing)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, n, HEAD, generator=generator, dtype=torch.float64).requires_grad_() for n in (2, 1))
    for positions in (Pass(0, 3), Pass(0, 3, ids=torch.tensor([[0, 1, 2], [7, 8, 9]]))):
        assert torch.autograd.gradcheck(lambda q, k, p=positions: rotary(q, k, p), (q, k))


def test_rotary_rows_may_differ_and_dtypes_stay():
    rotary, x = Rotary(HEAD), torch.randn(2, 3, 2, HEAD)
    ids = torch.tensor([[0, 1, 2], [5, 6, 9]])
    q, _ = rotary(x, x, Pass(0, 3, ids=ids))
    for row in range(2):
        alone, _ = rotary(x[row : row + 1], x[row : row + 1], Pass(0, 3, ids=ids[row]))
        assert torch.equal(q[row : row + 1], alone)
    half, _ = rotary(x.bfloat16(), x.bfloat16(), Pass(0, 3))
    assert half.dtype == torch.bfloat16 and half.shape == x.shape


@pytest.mark.parametrize("dim", [0, 3, HEAD + 2, -2])
def test_rotary_refuses_an_odd_dim(dim: int):
    with refused(code="range", field="position.dim") as error:
        Rotary(HEAD, dim=dim)
    assert error.value.value == dim


# Scalings, by their closed forms

CONTEXT = 64


def rates(scaling: dict | None, t: int = 16, dim: int = 32) -> tuple[Tensor, float]:
    """The angle per position of each pair, and the length of a turned unit vector, as they come out."""
    ctx = BuildContext(d_model=dim, vocab_size=2, context=CONTEXT, n_layers=1)
    config = RotaryConfig.model_validate({"kind": "rotary", "pairing": "interleaved", "scaling": scaling})
    rotary = config.build(ctx.within(head_dim=dim))
    x = torch.zeros(1, 1, 1, dim)
    x[..., 0::2] = 1.0
    y, _ = rotary(x, x, Pass(t - 1, t, ids=torch.tensor([1])))
    pairs = torch.complex(y.flatten()[0::2].double(), y.flatten()[1::2].double())
    return pairs.angle(), float(pairs.abs().mean())


PLAIN = torch.tensor([10000.0 ** (-2 * i / 32) for i in range(16)], dtype=torch.float64)


def near(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)


def test_unscaled_linear_and_ntk():
    near(rates(None)[0], PLAIN)
    near(rates({"kind": "linear", "factor": 4.0})[0], PLAIN / 4)
    base = 10000.0 * 4 ** (32 / 30)
    near(
        rates({"kind": "ntk", "factor": 4.0})[0],
        torch.tensor([base ** (-2 * i / 32) for i in range(16)]).double(),
    )
    fast, slow = rates({"kind": "ntk", "factor": 4.0})[0][[0, -1]]
    assert abs(fast - 1) < 1e-6 and abs(slow - PLAIN[-1] / 4) < 1e-9  # the slowest pair is exactly interpolated


def test_dynamic_ntk_is_plain_within_its_context():
    scaling = {"kind": "dynamic_ntk", "factor": 2.0}
    near(rates(scaling, t=CONTEXT)[0], PLAIN)
    base = 10000.0 * (2.0 * 3 - 1) ** (32 / 30)
    near(rates(scaling, t=3 * CONTEXT)[0], torch.tensor([base ** (-2 * i / 32) for i in range(16)]).double())


def test_llama3_keeps_fast_pairs_and_interpolates_slow_ones():
    """8192 tokens, factor 8, turns 1 to 4: the published settings of Llama 3.1, written out from its code."""
    scaling = {"kind": "llama3", "factor": 8.0, "original_context": 8192}
    expected = []
    for rate in PLAIN.tolist():
        length = 2 * math.pi / rate
        smooth = (8192 / length - 1.0) / 3.0
        middle = (1 - smooth) * rate / 8 + smooth * rate
        expected.append(rate if length < 8192 / 4 else rate / 8 if length > 8192 / 1 else middle)
    near(rates(scaling)[0], torch.tensor(expected).double())
    assert rates(scaling)[1] == pytest.approx(1.0, abs=1e-5)


def test_yarn_ramps_between_whole_pairs():
    scaling = {"kind": "yarn", "factor": 4.0, "original_context": 2048}

    def pair(turns: float) -> float:
        return 32 * math.log(2048 / (turns * 2 * math.pi)) / (2 * math.log(10000))

    low, high = math.floor(pair(32)), math.ceil(pair(1))
    ramp = ((torch.arange(16) - low) / (high - low)).clamp(0, 1).double()
    found, length = rates(scaling)
    near(found, PLAIN / 4 * ramp + PLAIN * (1 - ramp))
    assert 0 < low < high < 16 and length == pytest.approx(0.1 * math.log(4) + 1, rel=1e-5)
    assert rates(scaling | {"attention_factor": 1.5})[1] == pytest.approx(1.5, rel=1e-5)
    assert rates(scaling | {"factor": 1.0})[1] == pytest.approx(1.0, rel=1e-5)


def test_scalings_agree_with_the_published_code():
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    for kind, extra in (
        ("linear", {}),
        ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("yarn", {}),
    ):
        parameters = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, **extra}
        config = transformers.LlamaConfig(
            hidden_size=32, num_attention_heads=1, max_position_embeddings=256,
            rope_parameters={**parameters, "original_max_position_embeddings": 64},
        )  # fmt: skip
        theirs, magnitude = rope.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        mine, length = rates({"kind": kind, "factor": 4.0, "original_context": 64, **extra})
        near(mine, theirs.double())
        assert length == pytest.approx(magnitude, rel=1e-5)


@pytest.mark.parametrize(("head", "fraction"), [(64, 0.29), (40, 0.47), (100, 0.29), (80, 0.4), (96, 0.25)])
def test_a_share_of_the_head_is_cut_as_in_the_published_code(head: int, fraction: float):
    rope, transformers = pytest.importorskip("transformers.modeling_rope_utils"), pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(
        hidden_size=head, num_attention_heads=1,
        rope_parameters={"rope_type": "linear", "factor": 1.0, "rope_theta": 1e4, "partial_rotary_factor": fraction},
    )  # fmt: skip
    theirs, _ = rope.ROPE_INIT_FUNCTIONS["linear"](config, torch.device("cpu"))
    ctx = BuildContext(d_model=head, vocab_size=2, context=CONTEXT, n_layers=1)
    rotary = RotaryConfig(fraction=fraction).build(ctx.within(head_dim=head))
    assert rotary.dim == 2 * len(theirs)
    near(rotary.frequencies(1), theirs)


# The others


@given(st.integers(0, 5000), st.sampled_from([2, 8, 64]), st.sampled_from([100.0, 10000.0]))
def test_sinusoidal_is_its_formula(position: int, d: int, base: float):
    found = Sinusoidal(d, base)(at(position))[0]
    for i in range(d // 2):
        angle = position / base ** (2 * i / d)
        assert found[2 * i] == pytest.approx(math.sin(angle), abs=1e-3)
        assert found[2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-3)


def test_in_halves_all_sines_come_first():
    turns = Sinusoidal(24)(Pass(0, 60))
    assert torch.equal(Sinusoidal(24, layout="halves")(Pass(0, 60)), torch.cat((turns[:, ::2], turns[:, 1::2]), 1))


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_sinusoidal_products_depend_only_on_distance(m: int, n: int, by: int):
    table = Sinusoidal(32)(at(m, n, m + by, n + by))
    torch.testing.assert_close(table[0] @ table[1], table[2] @ table[3], rtol=1e-3, atol=2e-3)
    rate = [10000.0 ** (-2 * i / 32) for i in range(16)]
    assert float(table[0] @ table[1]) == pytest.approx(sum(math.cos((m - n) * r) for r in rate), abs=2e-3)


def test_sinusoidal_refuses_an_odd_width():
    with refused(code="range", field="d_model"):
        Sinusoidal(7)


def test_learned_looks_up_and_ends():
    learned = Learned(6, 4)
    assert learned.limit == 6 and torch.equal(learned(Pass(0, 6)), learned.weight)
    assert torch.equal(learned(at(5, 0, 5)), learned.weight[[5, 0, 5]])
    ids = torch.tensor([[0, 1], [4, 5]])
    assert torch.equal(learned(Pass(4, 6, ids=ids)), learned.weight[ids])
    with pytest.raises(RequestError) as refused:
        learned(Pass(0, 7))
    message = str(refused.value)
    assert "ends at 6" in message and "7" in message and "\n" not in message and message.count(".") == 0


def test_learned_positions_start_at_offset():
    """OPT: token 0 takes row 2, and the rows before it count as weights."""
    config, ctx = LearnedConfig(offset=2), BuildContext(d_model=4, vocab_size=3, context=6, n_layers=1)
    learned = config.build(ctx)
    assert learned.weight.shape == (8, 4) and config.num_params(ctx) == 32
    assert torch.equal(learned(Pass(0, 6)), learned.weight[2:])
    assert torch.equal(learned(at(5, 0, 5)), learned.weight[[7, 2, 7]])
    with refused(code="range", field="tokens"):
        learned(Pass(0, 7))


def test_learned_reads_packed_documents_that_each_fit():
    """Three documents of four tokens: the positions stay below six although the row does not."""
    ids = torch.arange(4).repeat(3)[None]
    learned = Learned(6, 4)
    try:
        assert torch.equal(learned(Pass(0, 12, ids=ids)), learned.weight[ids])
    except RequestError as refused:
        assert "12" in str(refused)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32])
def test_alibi_slopes_of_powers_of_two(n: int):
    """A geometric series that starts at its own ratio, 2^(-8/n)."""
    ratio = 2 ** (-8 / n)
    assert alibi_slopes(n) == pytest.approx([ratio**i for i in range(1, n + 1)])
    assert alibi_slopes(n)[-1] == pytest.approx(2**-8)


@pytest.mark.parametrize("n", [3, 5, 6, 12, 71])
def test_alibi_slopes_of_other_numbers(n: int):
    """Slopes are those of the power of two below n, then every other slope of the power above."""
    below = 1 << (n.bit_length() - 1)
    slopes = alibi_slopes(n)
    assert slopes[:below] == alibi_slopes(below) and slopes[below:] == alibi_slopes(2 * below)[0::2][: n - below]
    assert len(slopes) == n == len(set(slopes)) and all(0 < slope < 1 for slope in slopes)


def test_alibi_penalises_distance():
    bias = Alibi(4, max_bias=4.0).bias(Pass(2, 5))
    assert bias is not None and bias.additive
    q, k, n = torch.arange(2, 5).view(3, 1), torch.arange(5).view(1, 5), torch.arange(4).view(4, 1, 1)
    score = torch.randn(4, 3, 5)
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(4)]).view(4, 1, 1)
    found = bias(score, torch.tensor(0), n, q, k)
    torch.testing.assert_close(found, score - slopes * (q - k).abs())
    x = torch.randn(1, 3, 4, 2)
    assert Alibi(4)(x, x, Pass(0, 3)) == (x, x) or torch.equal(Alibi(4)(x, x, Pass(0, 3))[0], x)


def test_alibi_follows_given_positions():
    """The bias is -m |p_q - p_k| for positions p that the caller gives, as in rotary."""
    ids = torch.tensor([[0, 1, 5, 6], [2, 9, 9, 10]])
    bias = Alibi(2).bias(Pass(0, 4, ids=ids, given=ids))
    b, n = torch.arange(2).view(2, 1, 1, 1), torch.arange(2).view(1, 2, 1, 1)
    q, k = torch.arange(4).view(4, 1), torch.arange(4).view(1, 4)
    expected = -torch.tensor([2.0**-4, 2.0**-8]).view(1, 2, 1, 1) * (ids[:, :, None] - ids[:, None, :]).abs()[:, None]
    assert bias is not None
    torch.testing.assert_close(bias(torch.zeros(()), b, n, q, k), expected)


@pytest.mark.parametrize("change", ["rope", "alibi", "sinusoidal", "learned", "alibi+kernel=banded", "alibi+window:3"])
def test_positions_that_leave_gaps_are_seen(change: str):
    model, tokens = preset(f"llama@1m+layers=1+context=64+{change}").build().eval(), torch.arange(8)[None]
    gaps = torch.tensor([[0, 1, 2, 3, 20, 21, 22, 23]])
    with torch.no_grad():
        plain, apart = model(tokens), model(tokens, positions=gaps)
        assert torch.equal(model(tokens, positions=torch.arange(8)[None]), plain)
        state = model.init_state(1, 8)
        pieces = [model(tokens[:, at], state, positions=gaps[:, at]) for at in (slice(5), slice(5, 8))]
        torch.testing.assert_close(torch.cat(pieces, dim=1), apart, rtol=1e-4, atol=1e-5)
    assert torch.equal(apart[:, :4], plain[:, :4]) and not torch.allclose(apart[:, 4:6], plain[:, 4:6], atol=1e-4)


@pytest.mark.parametrize("wrong", [64, -1, 1 << 40])
def test_learned_names_a_position_that_it_does_not_know(wrong: int):
    model = preset("gpt2@1m+layers=1+context=64").build()
    with refused(code="range", field="positions") as error:
        model(torch.arange(2)[None], positions=torch.tensor([[0, wrong]]))
    assert error.value.value == wrong
    state = model.init_state(1, 8)
    model(torch.arange(2)[None], state, positions=torch.tensor([[62, 63]]))
    with refused(code="range", field="positions") as error:
        model(torch.arange(1)[None], state)
    assert error.value.value == 64


def test_value_shared_in_a_pass_is_computed_once():
    positions, made = Pass(0, 3), []
    for _ in range(3):
        positions.once("key", lambda: made.append(1))
    positions.once("other", lambda: made.append(2))
    assert made == [1, 2]
    assert positions.slots.tolist() == [0, 1, 2] and Pass.of(torch.zeros(2, 5, 3)).ids.tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [8, 6])
def test_readers_and_learners_turn_to_the_same_bits(pairing: Pairing, dim: int, dtype: torch.dtype):
    rotary, q = Rotary(8, dim=dim, pairing=pairing), torch.randn(2, 5, 3, 8).to(dtype)
    for ids in (torch.arange(5), torch.tensor([[0, 1, 2, 3, 4], [3, 0, 1, 2, 9]])):
        at = Pass(0, 5, ids=ids)
        learnt = rotary(q, q, at)[0]
        with torch.no_grad():
            read = rotary(q, q, at)[0]
        assert torch.equal(read, learnt) and read.stride() == learnt.stride()
        cos, sin = rotary.tables(at)
        torch.testing.assert_close(read, naive_turn(q, cos, sin, -2 if pairing == "half" else -1), rtol=1e-2, atol=1e-6)


def test_temperature_is_a_factor_of_later_queries():
    """1 up to the first step, then 1 + share ln 2, 1 + share ln 3; keys stay as they are."""
    part, q = Temperature(every=4, share=0.5), torch.randn(1, 5, 2, HEAD)
    turned, k = part(q, q[:, :, :1], at(0, 2, 3, 7, 11))
    factors = torch.tensor([1.0, 1.0, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(3), 1 + 0.5 * math.log(4)])
    torch.testing.assert_close(turned, q * factors.view(1, 5, 1, 1))
    assert torch.equal(k, q[:, :, :1])


def test_a_rounded_alibi_is_the_plain_one_to_a_softmax_but_for_its_rounding():
    """bf16(m k) / sqrt(h), which differs from -m |q - k| / sqrt(h) by a number for each query and three digits."""
    index = torch.arange(40)
    indices = (torch.zeros(1, 1, 1, 1, dtype=torch.long), torch.arange(12).view(1, 12, 1, 1), index.view(1, 1, -1, 1),
               index.view(1, 1, 1, -1))  # fmt: skip
    zero, past = torch.zeros(()), index[:, None] >= index
    plain, rounded = (
        Alibi(12, rounded=one, scale=0.25).bias(at(*index.tolist()))(zero, *indices).masked_fill(~past, -math.inf)
        for one in (False, True)
    )
    torch.testing.assert_close(rounded.softmax(-1), plain.softmax(-1), rtol=0.05, atol=0.0)
    assert not torch.allclose(rounded.softmax(-1), plain.softmax(-1), rtol=1e-4)
    slopes = torch.tensor(alibi_slopes(12)).bfloat16()
    wanted = (slopes[:, None].double() * index).bfloat16().double() * 0.25  # one rounding of an exact product
    given = Alibi(12, rounded=True, scale=0.25).bias(at(*index.tolist()))(zero, *indices)
    torch.testing.assert_close(given[0, :, 0].double(), wanted)


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("bert@1m+relbias", {True}),
        ("llama@1m+relbias", {False}),
        ("llama@1m+relbias+bidirectional", {True}),
        ("llama@1m+bidirectional+relbias", {True}),
        ("llama@1m+prefix+relbias", {True}),
        ("bert@1m+relbias+position.both_sides=false", {False}),
        ("llama@1m+relbias+share:2+bidirectional", {True}),
    ],
)
def test_relative_biases_look_where_tokens_see(expression: str, wanted: set[bool]):
    name, *changes = expression.split("+")
    config = preset("+".join([name, "layers=2+d_model=32+heads=2+vocab_size=11+context=16", *changes]))
    with torch.device("meta"):
        model = config.build()
    assert {layer.mixer.position.both_sides for layer in model.layers} == wanted
    assert {block.mixer.position.both_sides for block in config.resolved().layers()} == wanted


def test_relative_biases_of_two_towers_look_where_tokens_see():
    """The encoder's biases are bidirectional, the decoder's point back, as in T5, whose config declares it."""
    small = "+d_model=32+heads=2+vocab_size=11+context=16"
    config = preset("transformer@1m+relbias" + small)
    ours, published = (preset(name + small).resolved() for name in ("transformer@1m+relbias", "t5@1m"))
    assert config.encoder is not None
    for one in (ours, published):
        own = [block.mixer.position for block in one.layers() if not block.mixer.reads_memory]
        assert {position.both_sides for position in own} == {False}
        assert {block.mixer.position.both_sides for block in one.encoder.layers()} == {True}
