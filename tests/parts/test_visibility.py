"""Visibilities (attention masks), against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from glassformer.parts.visibility import Bidirectional, Causal, SameDocument, SlidingWindow, Visibility


def seen(visibility: Visibility, t: int, b: int = 1) -> Tensor:
    """(b, t, t): who sees whom."""
    rows, q, k = torch.arange(b).view(b, 1, 1), torch.arange(t).view(t, 1), torch.arange(t).view(1, t)
    return visibility.visible(rows, torch.tensor(0), q, k).expand(b, t, t)


@given(st.integers(1, 24), st.integers(1, 30))
def test_a_window_sees_itself_and_those_just_before(t: int, window: int):
    mask = seen(SlidingWindow(window), t)[0]
    for i in range(t):
        assert mask[i].nonzero().flatten().tolist() == list(range(max(0, i - window + 1), i + 1))


@given(st.integers(1, 24), st.integers(1, 30))
def test_keys_seen_is_the_mean_of_a_count(t: int, window: int):
    for visibility in (SlidingWindow(window), Causal(), Bidirectional()):
        count = seen(visibility, t).sum().item() / t
        assert visibility.keys_seen(t) == pytest.approx(count)


@given(st.integers(1, 12))
def test_causal_and_bidirectional(t: int):
    assert torch.equal(seen(Causal(), t)[0], torch.ones(t, t).tril().bool())
    assert seen(Bidirectional(), t).all()


@given(st.integers(2, 16), st.integers(1, 6), st.integers(0, 1000))
def test_skipped_keys_are_invisible(t: int, window: int, seed: int):
    """`causal` and `reach` are promises."""
    ids = torch.randint(0, 3, (2, t), generator=torch.Generator().manual_seed(seed))
    for inner in (Causal(), Bidirectional(), SlidingWindow(window)):
        for visibility in (inner, SameDocument(inner, ids)):
            mask = seen(visibility, t, 2)
            distance = torch.arange(t).view(t, 1) - torch.arange(t).view(1, t)
            if visibility.causal:
                assert not mask[:, distance < 0].any()
            if visibility.reach is not None:
                assert not mask[:, distance >= visibility.reach].any()
            for first in range(t):
                spans = visibility.spans(first, min(first + 3, t), t)
                assert spans == sorted(spans) and all(begin < end for begin, end in spans)
                skipped = [key for key in range(t) if not any(begin <= key < end for begin, end in spans)]
                assert not mask[:, first : first + 3, skipped].any()


def test_documents_do_not_see_each_other():
    ids = torch.tensor([[1, 1, 2, 2], [0, 3, 3, 0]])
    mask = seen(SameDocument(Bidirectional(), ids), 4, 2)
    assert torch.equal(mask, ids[:, :, None] == ids[:, None, :])
    assert torch.equal(seen(SameDocument(Causal(), ids), 4, 2), mask & torch.ones(4, 4).tril().bool())
