"""Sparse attention and sinks, against loops, published classes, and each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from glassformer.errors import RequestError
from glassformer.naming import preset
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import (
    AttentionCall,
    Banded,
    Direct,
    Flex,
    HeadLayout,
    Kernel,
    Naive,
    Sdpa,
    naive_attention,
)
from glassformer.parts.mixer import Attention
from glassformer.parts.mixer.kv import KVState, PinnedState, WindowState
from glassformer.parts.visibility import (
    BigBird,
    Causal,
    Chunked,
    Dilated,
    Longformer,
    Prefix,
    SameDocument,
    SlidingWindow,
    Visibility,
)
from tests.refused import refused

SPARSE: dict[str, Visibility] = {
    "chunked": Chunked(5),
    "dilated": Dilated(3, 4),
    "dilated by one": Dilated(4, 1),
    "prefix": Prefix(6),
    "longformer": Longformer(5, 2),
    "longformer two-sided": Longformer(4, 3, causal=False),
    "longformer of many globals": Longformer(40, 30),
    "bigbird": BigBird(3, 2, seed=0, layer=1),
    "bigbird two-sided": BigBird(3, 2, seed=1, causal=False),
    "bigbird of one block": BigBird(40, 2, causal=False),
}


def seen(visibility: Visibility, t: int, b: int = 1) -> Tensor:
    """(b, t, t): who sees whom."""
    rows, q, k = torch.arange(b).view(b, 1, 1), torch.arange(t).view(t, 1), torch.arange(t).view(1, t)
    return visibility.visible(rows, torch.tensor(0), q, k).expand(b, t, t)


# Definitions, one pair at a time


def sees(name: str, visibility: Any, q: int, k: int, t: int) -> bool:
    """Returns True if q attends to k by the papers' definitions."""
    past = k <= q
    if name.startswith("chunked"):
        return past and q // visibility.chunk == k // visibility.chunk
    if name.startswith("dilated"):
        return q - k in range(0, visibility.window * visibility.stride, visibility.stride)
    if name.startswith("prefix"):
        return past or k < visibility.length
    if name.startswith("longformer"):
        first = visibility.globals
        if visibility.causal:
            return past and (q - k < visibility.window or k < first)
        return abs(q - k) <= visibility.window // 2 or k < first or q < first
    i, j, m = q // visibility.block, k // visibility.block, -(-t // visibility.block)
    drawn = [int(block) for block, there in (visibility.drawn(i, r) for r in range(visibility.random)) if there]
    if visibility.causal:
        return past and (j in (0, i, i - 1) or j in drawn)
    return i in (0, m - 1) or j in (0, m - 1, i - 1, i, i + 1) or j in drawn


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("t", [1, 2, 6, 17, 31])
def test_sparse_visibilities_equal_their_definitions(name: str, t: int):
    visibility = SPARSE[name].sized(t)
    expected = [[sees(name, visibility, q, k, t) for k in range(t)] for q in range(t)]
    found = seen(visibility, t)[0]
    assert found.tolist() == expected
    assert visibility.keys_seen(t) == pytest.approx(found.sum().item() / t)
    assert found.diagonal().all() and visibility.sees_itself
    assert not visibility.causal or not found.triu(1).any()


@pytest.mark.parametrize("name", SPARSE)
@settings(max_examples=25)
@given(t=st.integers(1, 30), seed=st.integers(0, 1000), sort=st.booleans())
def test_skipped_keys_of_sparse_visibilities_are_invisible(name: str, t: int, seed: int, sort: bool):
    """`spans`, `causal` and `reach` are promises, alone and in documents of any lengths."""
    ids = torch.randint(0, 3, (2, t), generator=torch.Generator().manual_seed(seed))
    ids = ids.sort(dim=1).values if sort else ids
    for visibility in (SPARSE[name].sized(t), SameDocument(SPARSE[name], ids)):
        masks: dict[Any, Tensor] = {}
        mask = seen(visibility, t, 2)
        distance = torch.arange(t).view(t, 1) - torch.arange(t).view(1, t)
        if visibility.causal:
            assert not mask[:, distance < 0].any()
        if visibility.reach is not None:
            assert not mask[:, distance >= visibility.reach].any()
        for first in range(0, t, 2):
            last = min(first + 4, t)
            spans = visibility.spans(first, last, t)
            assert spans and spans == sorted(spans) and all(begin < end for begin, end in spans)
            skipped = [key for key in range(t) if not any(begin <= key < end for begin, end in spans)]
            assert not mask[:, first:last, skipped].any()
            read = [key for begin, end in spans for key in range(begin, end)]
            assert mask[:, first:last, read[: visibility.sure(first, last, t)]].all()
            alike = visibility.alike(first, last, t)
            if alike is not None:  # whatever comes after the sure ones
                rest = mask[:, first:last, read[visibility.sure(first, last, t) :]]
                assert torch.equal(masks.setdefault(alike, rest), rest)


@pytest.mark.parametrize("name", SPARSE)
def test_places_count_from_the_start_of_a_document(name: str):
    lengths = [7, 1, 12, 4]
    ids = torch.repeat_interleave(torch.tensor([3, 0, 3, 5]), torch.tensor(lengths))[None]
    apart = torch.block_diag(*(seen(SPARSE[name].sized(n), n)[0].float() for n in lengths)).bool()
    packed = seen(SameDocument(SPARSE[name], ids), sum(lengths))[0]
    if SPARSE[name].absolute:
        assert torch.equal(packed, apart)
    else:  # documents of one id that do not touch are one
        assert not (packed & ~apart)[:8].any() and torch.equal(packed[:8, :8], apart[:8, :8])


def test_random_blocks_follow_seed_and_layer_and_spread():
    """Distinct, never those around a block, the same at any length; each far block is drawn about as often."""
    rows = [[BigBird(4, 3, seed, layer).row(i, 400) for i in range(100)] for seed in (0, 1) for layer in (0, 1)]
    assert len({str(row) for row in rows}) == 4
    for i, row in enumerate(rows[0]):
        assert len(row) == min(i + 1, 6) and row <= set(range(i + 1))
        assert row == BigBird(4, 3, 0, 0).row(i, 4 * i + 1)
    counts = torch.zeros(96)
    for seed in range(2000):
        for block in BigBird(1, 3, seed, 0).row(98, 99) - {0, 97, 98}:
            counts[block - 1] += 1
    assert counts.sum() == 6000 and counts.min() > 30 and counts.max() < 100  # 62.5 each


# Kernels


KERNELS: dict[str, Kernel] = {
    "banded": Banded(), "banded of 4": Banded(block=4), "banded of 40": Banded(block=40), "sdpa": Sdpa(),
    "direct": Direct(),
}  # fmt: skip


def grads(run: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
    z = run()
    upstream = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=z.dtype)
    return (z.detach(), *torch.autograd.grad(z, leaves, upstream))


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_every_kernel_is_the_definition(name: str, sinks: bool):
    """Outputs and gradients, in fp64: alone, in documents, for the last queries of a longer text."""
    t, generator = 33, torch.Generator().manual_seed(0)
    ids = torch.tensor([[0] * 5 + [1] * 21 + [2] * 7, [4] * 33])
    column = torch.randn(4, dtype=torch.float64, generator=generator).requires_grad_() if sinks else None
    for s in (t, 9):
        q, k, v = (
            torch.randn(2, x, n, 8, dtype=torch.float64, generator=generator).requires_grad_()
            for x, n in ((s, 4), (t, 2), (t, 2))
        )
        leaves = [x for x in (q, k, v, column) if x is not None]
        for visibility in (SPARSE[name].sized(t), SameDocument(SPARSE[name], ids)):
            call = AttentionCall(q, k, v, visibility, sinks=column)
            expected = grads(lambda call=call: naive_attention(call), *leaves)
            for kernel in KERNELS.values():
                for mine, theirs in zip(grads(lambda: kernel(call), *leaves), expected, strict=True):  # noqa: B023
                    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces FlexAttention by torch's eager definition, which has gradients on a CPU; the compiled one has not."""
    monkeypatch.setattr("glassformer.parts.kernel.flex._flex", lambda: (flex.create_block_mask, flex.flex_attention))
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


@pytest.mark.parametrize("name", ["causal", "chunked", "prefix", "longformer", "longformer two-sided"])
def test_flex_with_sinks_equals_naive(name: str, eager_flex: None):
    """Outputs and gradients, those of the sinks too: alone, in documents, for the last queries of a longer text."""
    t, generator = 33, torch.Generator().manual_seed(0)
    ids = torch.tensor([[0] * 5 + [1] * 21 + [2] * 7, [4] * 33])
    visibility = SPARSE.get(name, Causal())
    sinks = torch.randn(4, generator=generator).requires_grad_()
    for s in (t, 9):
        q, k, v = (torch.randn(2, x, n, 16, generator=generator).requires_grad_() for x, n in ((s, 4), (t, 2), (t, 2)))
        for sight in (visibility.sized(t), SameDocument(visibility, ids)):
            call = AttentionCall(q, k, v, sight, sinks=sinks)
            found, expected = (grads(lambda one=one: one(call), q, k, v, sinks) for one in (Flex().attend, Naive()))  # noqa: B023
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_keeps_nothing_that_grows_with_the_square(dtype: torch.dtype, eager_flex: None):
    sinks = torch.zeros(4, requires_grad=True)
    q, k, v = (torch.randn(2, 64, n, 16, dtype=dtype, requires_grad=True) for n in (4, 2, 2))
    call, saved = AttentionCall(q, k, v, Causal(), sinks=sinks), {}

    def pack(x: Tensor) -> Tensor:
        if x.is_floating_point():
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        Flex().attend(call)
    heads = HeadLayout(4, 2)
    kept = Flex().keeps(call.facts, Causal(), heads)
    largest = 2 * 4 * 64 * 4  # of each row's scores, which torch's definition keeps in addition to their sum
    assert kept.given == "qkv" and kept.own + q.nbytes + k.nbytes + v.nbytes + largest == sum(saved.values())


def test_a_sink_takes_its_part_of_the_softmax():
    """softmax over the scores and one more, which has no value: sigmoid(log sum exp - sink) of the plain result."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 6, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    sinks = torch.tensor([0.7, -1.3], dtype=torch.float64)
    call = AttentionCall(q, k, v, SlidingWindow(3))
    scores = torch.einsum("bsnh,btnh->bnst", q, k) / 2
    hidden = ~seen(SlidingWindow(3), 6)[0]
    lse = scores.masked_fill(hidden, float("-inf")).logsumexp(-1)  # (b, n, s)
    part = torch.sigmoid(lse - sinks.view(1, 2, 1)).transpose(1, 2)[..., None]
    torch.testing.assert_close(naive_attention(call.replace(sinks=sinks)), part * naive_attention(call))
    none = call.replace(sinks=torch.full((2,), float("-inf"), dtype=torch.float64))
    torch.testing.assert_close(naive_attention(none), naive_attention(call))


@pytest.mark.parametrize("name", [name for name in SPARSE if "one block" not in name and "many" not in name])
def test_flops_grow_only_with_visible_keys(name: str):
    """FLOPs of blocks, forward and backward, grow with the keys seen and not with the square."""
    from torch.utils.flop_counter import FlopCounterMode

    if name == "prefix":
        return  # half of the square, as causal attention
    kinds = {
        "chunked": Chunked(128), "dilated": Dilated(64, 4), "dilated by one": Dilated(64, 1),
        "longformer": Longformer(64, 4), "longformer two-sided": Longformer(64, 4, causal=False),
        "bigbird": BigBird(32, 2), "bigbird two-sided": BigBird(32, 2, causal=False),
    }  # fmt: skip
    done = []
    for t in (1024, 2048):
        visibility = kinds[name].sized(t)
        q, k, v = (torch.randn(1, t, n, 4).requires_grad_() for n in (2, 1, 1))
        with FlopCounterMode(display=False) as counter:
            Banded()(AttentionCall(q, k, v, visibility)).sum().backward()
        done.append(counter.get_total_flops() / (6 * 2 * t * 2 * 4))
    assert done[1] < 1.15 * done[0] and done[1] < 3 * kinds[name].keys_seen(2048) + 130


def test_a_step_of_decoding_reads_the_keys_that_it_may_see():
    """And the same keys as the definition."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (torch.randn(2, x, n, 4, dtype=torch.float64) for x, n in ((1, 4), (512, 2), (512, 2)))
    ids = torch.tensor([[1] * 400 + [2] * 112, [1] * 512])
    for visibility in (BigBird(8, 2), SameDocument(BigBird(8, 2), ids)):
        call = AttentionCall(q, k, v, visibility)
        with FlopCounterMode(display=False) as counter:
            z = Direct()(call)
        torch.testing.assert_close(z, naive_attention(call))
        assert counter.get_total_flops() <= 2 * 2 * 2 * 4 * 4 * 128  # 5 blocks of 8 for each row, filled up to 64


def test_packed_documents_are_not_computed_across():
    """Blocks know where documents end: four of 256 tokens cost a quarter of one of 1024, and the edges."""
    from torch.utils.flop_counter import FlopCounterMode

    from glassformer.parts.visibility import Causal

    ids = torch.arange(4).repeat_interleave(256)[None]
    done = []
    for visibility in (Causal(), SameDocument(Causal(), ids)):
        q, k, v = (torch.randn(1, 1024, 2, 4) for _ in range(3))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            Banded()(AttentionCall(q, k, v, visibility))
        done.append(counter.get_total_flops())
    assert done[1] < 0.35 * done[0]


# States


def test_states_keep_only_keys_visible_to_later_queries():
    def state(visibility: Visibility, rewind: int = 0) -> KVState:
        return Attention(16, 2, visibility=visibility).init_state(1, 64, torch.float32, rewind=rewind)

    sizes = {name: state(visibility).nbytes // (2 * 16 * 4) for name, visibility in SPARSE.items()}
    assert sizes["chunked"] == 5 and sizes["longformer"] == 5 + 2 and sizes["dilated"] == 9
    assert sizes["bigbird"] == sizes["prefix"] == sizes["longformer two-sided"] == 64
    assert type(state(Longformer(5, 2))) is PinnedState and type(state(Chunked(5))) is WindowState
    assert type(state(Longformer(60, 4))) is KVState  # as large as the context
    assert state(Longformer(5, 2), rewind=3).nbytes == 10 * 2 * 16 * 4


@pytest.mark.parametrize("rows", [False, True], ids=["together", "apart"])
def test_dilated_ring_returns_only_keys_of_the_step(rows: bool):
    """Four of the ring's 13 and more, with those that a rewind leaves."""
    mixer, x = _mixer(Dilated(4, 4)), torch.randn(2, 40, 16)
    with torch.no_grad():
        whole, state = mixer(x, Pass(0, 40)), mixer.init_state(2, 64, torch.float32, rewind=3)
        mixer(x[:, :29], Pass(0, 29), state)
        state.truncate(27)
        for at in range(27, 40):
            told = {"rows": torch.full((2,), at), "tokens": 1} if rows else {}
            pass_ = Pass(at, at + 1, **told)
            step = x[:, at : at + 1]
            torch.testing.assert_close(mixer(step, pass_, state), whole[:, at : at + 1], rtol=1e-5, atol=1e-6)
            k, v, held = state.append(*(torch.randn(2, 1, 2, 4) for _ in "kv"), Pass(at, at + 1, **told))
            assert k.shape[1] == v.shape[1] == 4 and held is not None
            assert held.reshape(-1, 4)[0].tolist() == [at, at - 4, at - 8, at - 12]
            mixer(step, pass_, state)  # what was stored in place of it


@pytest.mark.parametrize("name", [name for name in SPARSE if SPARSE[name].causal])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_any_pieces_of_any_documents_are_the_whole(name: str, seed: int):
    """Random packed documents, read in random pieces into a state, with positions given or not."""
    generator = torch.Generator().manual_seed(seed)
    mixer = _mixer(SPARSE[name])
    t = 40
    ids = (torch.rand(2, t, generator=generator) < 0.12).cumsum(1)
    x = torch.randn(2, t, 16, generator=generator)
    sizes = torch.randint(1, 7, (t,), generator=generator).tolist()
    with torch.no_grad():
        whole = mixer(x, Pass(0, t, documents=ids))
        state, parts, at = mixer.init_state(2, t, torch.float32), [], 0
        while at < t:
            end = min(t, at + sizes[at])
            parts.append(mixer(x[:, at:end], Pass(at, end, documents=ids[:, :end]), state))
            at = end
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in SPARSE if SPARSE[name].causal])
def test_rows_of_different_lengths_continue_together(name: str):
    """Rows read 1 to 29 tokens separately and then continue together, one or several tokens at a time."""
    mixer, t, lengths = _mixer(SPARSE[name]), 40, [1, 4, 11, 29]
    x = torch.randn(4, t, 16, generator=torch.Generator().manual_seed(3))
    state = mixer.init_state(4, t, torch.float32)
    with torch.no_grad():
        whole = mixer(x, Pass(0, t))
        for row, length in enumerate(lengths):
            alone = mixer.init_state(1, t, torch.float32)
            mixer(x[row : row + 1, :length], Pass(0, length), alone)
            state.put(row, alone, length)
        rows = torch.tensor(lengths)
        for count in (1, 1, 3, 1, 5):
            at = rows[:, None] + torch.arange(count)
            new = x[torch.arange(4)[:, None], at]
            last = int(rows.max()) + count
            pass_ = Pass(last - count, last, ids=at, rows=rows, tokens=count)
            expected = whole[torch.arange(4)[:, None], at]
            torch.testing.assert_close(mixer(new, pass_, state), expected, rtol=1e-4, atol=1e-5)
            rows = rows + count


def test_a_pinned_document_that_is_gone_is_not_gone_back_to():
    mixer = _mixer(Longformer(3, 2))
    state, ids = mixer.init_state(1, 40, torch.float32, rewind=4), torch.tensor([[1] * 9 + [2] * 3])
    with torch.no_grad():
        for at in range(12):
            mixer(torch.randn(1, 1, 16), Pass(at, at + 1, documents=ids[:, : at + 1]), state)
    with refused(code="unsupported", field="length"):
        state.truncate(8)
    state.truncate(10)


def _mixer(visibility: Visibility) -> Attention:
    torch.manual_seed(0)
    mixer = Attention(16, 4, 2, visibility=visibility)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
    return mixer


# Requests


def test_wrong_requests_name_the_field():
    base = "llama@1m"
    for change, field in (
        ("longformer:0", "longformer"), ("longformer:64:0", "longformer"), ("longformer:64:x", "longformer"),
        ("bigbird:0", "bigbird"), ("bigbird:64:-1", "bigbird"), ("dilated:64", "dilated"), ("dilated:64:0", "dilated"),
        ("chunked:0", "chunked"), ("prefix:0", "prefix"), ("prefix:", "prefix"), ("sinks:1", "sinks"),
        ("chunked:64+visibility.chunk=-3", "chunk"), ("longformer:5+visibility.causal=false", "window"),
        ("bigbird:64+visibility.random=-1", "random"), ("mamba+sinks", "mixer.sinks"),
    ):  # fmt: skip
        with pytest.raises(RequestError) as refused:
            preset(f"{base}+{change}").check()
        assert field in (refused.value.field or "") or field in str(refused.value), change


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: BigBird(0), "block"), (lambda: BigBird(4, -1), "random"), (lambda: Chunked(0), "chunk"),
        (lambda: Dilated(0, 1), "window"), (lambda: Dilated(4, 0), "rate"), (lambda: SlidingWindow(0), "window"),
        (lambda: Longformer(0), "window"), (lambda: Longformer(4, -1), "globals"), (lambda: Prefix(0), "length"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_refused_without_a_config(make: Any, field: str):
    with pytest.raises(RequestError) as refused:
        make()
    assert refused.value.field == field and refused.value.code == "range"


def test_large_values_are_full_attention():
    """A window or chunk larger than the text, more globals than tokens, a text shorter than a block."""
    x = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    plain = Attention(16, 4)
    for visibility in (Chunked(100), Longformer(100, 50), Longformer(1, 50), BigBird(100), Dilated(100, 1)):
        other = Attention(16, 4, visibility=visibility)
        other.load_state_dict(plain.state_dict())
        torch.testing.assert_close(other(x), plain(x))


@pytest.mark.parametrize("change", ["prefix:4", "longformer:4:1+visibility.causal=false",
                                    "bigbird:4+visibility.causal=false"])  # fmt: skip
def test_non_causal_models_are_refused_for_next_token(change: str):
    from glassformer.generation import generate
    from glassformer.training.objectives import NextTokenConfig

    config = preset(f"llama@1m+vocab_size=61+{change}")
    assert not config.causal
    with pytest.raises(RequestError) as refused:
        NextTokenConfig().check(config)
    assert refused.value.code == "causal"
    if not config.takes_prefix:  # one that does writes (tests/generation/test_prefix.py)
        with pytest.raises(RequestError):
            generate(config.build(), torch.zeros(1, 3, dtype=torch.long), max_new_tokens=1)


# Global tokens of a caller's choice, against the published class in test_sight_published.py


def test_chosen_globals_in_every_kernel():
    """A row of none, of one, of many: outputs and gradients, alone and in documents, and spans that hide no key."""
    t, generator = 33, torch.Generator().manual_seed(0)
    chosen = torch.zeros(3, t, dtype=torch.bool)
    chosen[1, 20] = chosen[2, [0, 1, 9, 30]] = True
    ids = torch.tensor([[0] * 33, [1] * 21 + [2] * 12, [4] * 5 + [5] * 28])
    leaves = [torch.randn(3, t, n, 8, dtype=torch.float64, generator=generator).requires_grad_() for n in (4, 2, 2)]
    visibility = Longformer(4, 3, causal=False).of_globals(chosen)
    for one in (visibility, SameDocument(visibility, ids)):
        for first in range(0, t, 4):
            spans = one.spans(first, first + 4, t)
            hidden = [key for key in range(t) if not any(begin <= key < end for begin, end in spans)]
            assert not seen(one, t, 3)[:, first : first + 4, hidden].any()
        expected = grads(lambda one=one: naive_attention(AttentionCall(*leaves, one)), *leaves)
        for kernel in KERNELS.values():
            found = grads(lambda: kernel(AttentionCall(*leaves, one)), *leaves)  # noqa: B023
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_a_model_takes_globals():
    """Naming the first tokens is the model's own choice; naming others reaches where windows do not."""
    small = "llama@1m+layers=1+d_model=24+heads=2+vocab_size=31+context=40+longformer:4:2"
    model = preset(f"{small}+visibility.causal=false").build(seed=0).double()
    tokens = torch.randint(31, (2, 40), generator=torch.Generator().manual_seed(0))
    place = torch.arange(40).expand(2, -1)
    torch.testing.assert_close(model(tokens, global_tokens=place < 2), model(tokens))
    moved = tokens.clone()
    moved[0, 39] = (moved[0, 39] + 1) % 31
    for named, reached in ((place == 39, True), (place == 20, False)):
        before, after = (model(some, global_tokens=named)[0, 0] for some in (tokens, moved))
        assert (not torch.equal(before, after)) == reached
    with refused(code="conflict", field="global_tokens"):
        model.hidden_states(tokens, global_tokens=place[:, :3] < 2)
    with refused(code="conflict", field="global_tokens"):
        preset(small).build(seed=0)(tokens, global_tokens=place < 2)
