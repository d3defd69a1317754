from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.errors import Code, RequestError
from glassformer.text.batches import Batches, bits_per_byte, evaluation_windows
from glassformer.text.documents import Document
from glassformer.text.permutation import keyed, permute, permuted
from glassformer.text.shards import token_shards
from glassformer.text.tokenizers import BPETokenizer, ByteTokenizer
from tests.refused import refused


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
@settings(deadline=None, max_examples=60)
def test_permute_is_a_bijection(n: int, key: int) -> None:
    assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))


def test_permute_is_a_bijection_for_every_small_n() -> None:
    for n in range(1, 130):
        assert len(set(permute(np.arange(n), n, n).tolist()) | {n}) == n + 1


def test_permute_needs_no_memory_for_n() -> None:
    n = 10**15
    found = permute(np.arange(1000), n, 7)
    assert len(set(found.tolist())) == 1000 and found.min() >= 0 and found.max() < n
    assert 0.4 < found.mean() / n < 0.6
    assert permute(np.array([17]), n, 7)[0] == found[17]


@given(n=st.integers(1, 5000), key=st.integers(0, 2**64 - 1), drawn=st.data())
@settings(deadline=None, max_examples=60)
def test_stretches_of_a_permutation_are_those_of_its_indices(n: int, key: int, drawn: st.DataObject) -> None:
    first = drawn.draw(st.integers(0, n - 1))
    count = drawn.draw(st.integers(1, n - first))
    assert permuted(first, count, n, key).tolist() == permute(np.arange(first, first + count), n, key).tolist()


@pytest.mark.parametrize("n", [5, 24, 1000])
def test_permute_looks_random(n: int) -> None:
    """Over keys, each place receives each value about equally often, and neighbours part."""
    keys = [keyed(n, trial) for trial in range(400)]
    first = np.array([permute(np.array([0, n - 1]), n, key) for key in keys])
    for column in first.T:
        counts = np.histogram(column, bins=5, range=(0, n))[0]
        expected = np.diff([math.ceil(n * k / 5) for k in range(6)]) / n * 400
        assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom, p = 0.001
    order = permute(np.arange(1000), 1000, keys[0])
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.15
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.15


CASES = st.tuples(st.integers(2, 400), st.integers(1, 5), st.integers(1, 20), st.integers(0, 3))


def windows_of_epoch(batches: Batches, epoch: int) -> list[int]:
    """The beginnings of all rows of one epoch, in order; `batches` must be of one row a step."""
    return [int(batches.starts(step)[0]) for step in range(epoch * batches.windows, (epoch + 1) * batches.windows)]


@given(CASES)
@settings(deadline=None)
def test_each_window_once_in_each_epoch(case: tuple[int, int, int, int]) -> None:
    n, _, context, seed = case
    if n <= context:
        return
    single = Batches(np.arange(n), 1, context, seed)
    for epoch in range(3):
        starts = sorted(windows_of_epoch(single, epoch))
        assert np.diff(starts).tolist() == [context] * (len(starts) - 1)  # they touch and do not overlap
        assert starts[0] >= 0 and starts[-1] + context + 1 <= n  # the last target exists
        assert n - len(starts) * context < 2 * context + 1  # and little is left out


@given(CASES, st.integers(1, 4))
@settings(deadline=None, max_examples=50)
def test_ranks_and_batch_sizes_only_cut_one_order(case: tuple[int, int, int, int], world: int) -> None:
    n, batch, context, seed = case
    if n <= context:
        return
    single = Batches(np.arange(n), 1, context, seed)
    ranks = [Batches(np.arange(n), batch, context, seed, rank, world) for rank in range(world)]
    for step in (0, 1, 5, 1000):
        union = np.concatenate([rank.starts(step) for rank in ranks])
        first = step * batch * world
        assert union.tolist() == [int(single.starts(first + row)[0]) for row in range(batch * world)]


def test_batches_are_a_pure_function_of_the_step() -> None:
    tokens = np.random.default_rng(0).integers(0, 60_000, 1000).astype(np.uint16)
    batches = Batches(tokens, 3, 16, seed=5)
    ahead = [batches[step] for step in range(50)]
    fresh = Batches(tokens, 3, 16, seed=5)
    for step in (49, 0, 17, 17, 3):  # any order, any number of times, after any interruption
        assert torch.equal(fresh[step].inputs, ahead[step].inputs)
        assert torch.equal(fresh[step].targets, ahead[step].targets)
    inputs, targets = batches[7]
    assert inputs.shape == targets.shape == (3, 16) and inputs.dtype == targets.dtype == torch.int64
    one_row = Batches(tokens, 1, 16)[0]
    assert one_row.inputs.data_ptr() // 8 + 1 != one_row.targets.data_ptr() // 8  # no shared memory
    assert inputs.is_contiguous() and targets.is_contiguous()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for row, start in zip(inputs.tolist(), batches.starts(7), strict=True):
        assert row == tokens[start : start + 16].tolist()


def test_epochs_and_seeds_differ_in_order_and_offset() -> None:
    single = Batches(np.arange(2000), 1, 16)
    first, second = windows_of_epoch(single, 0), windows_of_epoch(single, 1)
    assert [start // 16 for start in first] != [start // 16 for start in second]
    assert len({min(windows_of_epoch(single, epoch)) for epoch in range(20)}) > 8
    assert first != windows_of_epoch(Batches(np.arange(2000), 1, 16, seed=1), 0)


def test_a_seed_is_its_value() -> None:
    assert (
        Batches(np.arange(99), 4, 5, np.int64(3)).starts(9).tolist()
        == Batches(np.arange(99), 4, 5, 3).starts(9).tolist()
    )


def test_epoch_and_lengths() -> None:
    batches = Batches(np.arange(1000), 4, 10, world=2)
    assert batches.windows == 99 and batches.tokens_per_step == 80 and batches.steps_per_epoch == 13
    assert [batches.epoch(step) for step in (0, 12, 13, 1000)] == [0, 0, 1, 8000 // 99]
    assert Batches(np.arange(11), 1, 10).windows == 1


def test_every_target_is_seen_over_epochs() -> None:
    single = Batches(np.arange(100), 1, 8)
    seen = {
        int(start) + k for step in range(single.windows * 200) for start in single.starts(step) for k in range(1, 9)
    }
    assert seen == set(range(1, 100))


@pytest.mark.parametrize(
    ("arguments", "code", "field"),
    [
        ({"context": 10}, "range", "context"),
        ({"context": 0}, "range", "context"),
        ({"batch": 0}, "range", "batch"),
        ({"rank": 2, "world": 2}, "range", "rank"),
        ({"tokens": np.zeros((2, 2), int)}, "type", "tokens"),
        ({"tokens": np.zeros(20)}, "type", "tokens"),
    ],
)
def test_wrong_batches_are_refused(arguments: dict, code: Code, field: str) -> None:
    with refused(code=code, field=field):
        Batches(**{"tokens": np.arange(10), "batch": 1, "context": 4, **arguments})


def test_batches_read_shards() -> None:
    shards = token_shards(lambda: [Document("a", "hello world")], ByteTokenizer(), "f")
    inputs, targets = Batches(shards, 1, 11)[0]
    assert bytes(inputs[0].tolist()) == b"hello world" and targets[0, -1] == 256


@given(
    st.integers(2, 300),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 200) | st.none(),
    st.integers(1, 4),
)
@settings(deadline=None)
def test_no_target_is_scored_twice(n: int, context: int, stride: int, most: int | None, batch: int) -> None:
    if n <= context:
        return
    stride = min(stride, context)
    windows = evaluation_windows(np.arange(n), context, most, stride, token_bytes=np.arange(n) + 1, batch=batch)
    scored: list[int] = []
    for (inputs, targets), counts in windows:
        assert torch.equal(torch.where(targets < 0, inputs + 1, targets), inputs + 1)
        assert torch.equal(counts, torch.where(targets < 0, 0, targets + 1))
        scored += targets[targets >= 0].tolist()
    assert len(scored) == len(set(scored)) == windows.scored
    assert len(list(windows)) == len(windows)
    if most is None:
        assert sorted(scored) == list(range(1, max(scored) + 1)) and n - 1 - max(scored) < stride
    else:
        assert len(scored) <= max(most, stride) + context - stride


def test_fewer_windows_are_spaced_evenly() -> None:
    windows = evaluation_windows(np.arange(1001), 10, 100, token_bytes=np.ones(1001))
    assert windows.starts.tolist() == list(range(0, 1000, 100))
    assert windows.scored == 100


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=30, max_size=200))
@settings(deadline=None, max_examples=30)
def test_the_bytes_of_the_targets_are_the_bytes_of_the_text(text: str) -> None:
    ids = BPE.encode(text)
    for context in (1, 3):
        if len(ids) <= context:
            continue
        windows = evaluation_windows(ids, context, token_bytes=BPE.token_bytes())
        total = sum(int(batch.bytes.sum()) for batch in windows)
        last = windows.scored
        assert total == BPE.token_bytes()[ids[1 : last + 1]].sum()
        if last == len(ids) - 1:
            assert total == len(text.encode()) - BPE.token_bytes()[ids[0]]


BPE = BPETokenizer.train(["the cat sat on the mat " * 20], 280)


def test_a_uniform_model_over_bytes_has_eight_bits_per_byte() -> None:
    ids = ByteTokenizer().encode("any text at all, whatever it says")
    windows = evaluation_windows(ids, 8, token_bytes=ByteTokenizer().token_bytes())
    text_bytes = sum(int(batch.bytes.sum()) for batch in windows)
    assert bits_per_byte(windows.scored * math.log(256), text_bytes) == pytest.approx(8.0)
    with pytest.raises(RequestError):
        bits_per_byte(1.0, 0)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"context": 50}, "context"),
        ({"stride": 9}, "stride"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_wrong_windows_are_refused_before_they_are_read(arguments: dict, field: str) -> None:
    with refused(code="range", field=field):
        evaluation_windows(**{"tokens": np.arange(50), "context": 8, "token_bytes": np.ones(50), **arguments})
