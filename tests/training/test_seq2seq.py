"""The objective seq2seq: pairs become sources and targets, alike for every seed, step and rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.errors import RequestError
from glassformer.parts.loss import IGNORED
from glassformer.text import ByteTokenizer
from glassformer.text.languages import pairs
from glassformer.training import train
from glassformer.training.objectives.seq2seq import PairBatches, Pairs

BYTES = ByteTokenizer()
END = BYTES.eos_id
TINY = "transformer@1m+layers=2+d_model=96+heads=4"


def stream(*texts: str) -> np.ndarray:
    return np.concatenate([np.append(BYTES.encode(text), END) for text in texts])


def test_a_batch_is_the_pairs():
    batch = Pairs(stream("ab\tc", "d\tefg"), BYTES).batch([0, 1])
    assert batch.source.tolist() == [[97, 98, END], [100, END, END]]
    assert batch.source_documents.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.inputs.tolist() == [[END, 99, END, END], [END, 101, 102, 103]]
    assert batch.targets.tolist() == [[99, END, IGNORED, IGNORED], [101, 102, 103, END]]


def test_pieces_and_copies_keep_their_sources():
    batch = Pairs(stream("ab\tc", "d\tefg", "h\ti"), BYTES).batch([0, 1, 2]).to("cpu")
    found = list(batch.pieces(2))
    assert [share for _, share in found] == [6 / 8, 2 / 8]
    assert torch.equal(torch.cat([piece.source for piece, _ in found]), batch.source)
    assert torch.equal(torch.cat([piece.source_documents for piece, _ in found]), batch.source_documents)
    inputs, targets = batch
    assert inputs.shape == targets.shape


def test_an_epoch_has_each_pair_once_and_ranks_divide_it():
    found = Pairs(stream(*("\t".join(pair) for pair in pairs("reversal", 12))), BYTES)
    one = PairBatches(found, 4, seed=3)
    assert sorted(number for step in range(3) for number in one.numbers(step)) == list(range(12))
    halves = [PairBatches(found, 2, 3, rank, 2) for rank in (0, 1)]
    for step in range(5):
        assert one.numbers(step) == halves[0].numbers(step) + halves[1].numbers(step)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["a\tb", "c"], "2 documents and 1 tabs"),
        (["a\tb\tc", "d"], "a pair is a source, one tab"),
        (["a\tb", "\tc"], "the source of pair 1 is empty"),
    ],
    ids=str,
)
def test_what_is_no_pair_is_refused(texts: list[str], said: str):
    with pytest.raises(RequestError, match=said):
        Pairs(stream(*texts), BYTES)


@pytest.mark.parametrize(
    ("model", "context", "said"),
    [("llama@1m", 16, "gives a source to an encoder"), ("transformer@1m", 8, "tokens with its end; the context is 8")],
)
def test_what_cannot_be_trained_is_refused(model: str, context: int, said: str):
    recipe: dict[str, Any] = {"tokens": 64, "batch_size": 2, "context": context, "objective": "seq2seq"}
    with pytest.raises(RequestError, match=said):
        train(gf.preset(model), "pairs:reversal", recipe)


def test_a_comparison_says_that_it_cannot_measure_it(tmp_path: Any):
    with pytest.raises(RequestError, match="objective seq2seq yet"):
        gf.compare(
            ["transformer@1m"], data="pairs:reversal", tokens=1000, objective="seq2seq", out=str(tmp_path / "out")
        )


def test_a_step_learns_from_both_sides(tmp_path: Any):
    """The encoder too: its weights move."""
    config = gf.preset(TINY)
    run = train(config, "pairs:reversal", {"steps": 2, "batch_size": 4, "context": 16, "objective": "seq2seq",
                                           "learning_rate": 1e-3, "seed": 0, "device": "cpu"})  # fmt: skip
    fitted = run.model.config.build(seed=0)
    for name, weight in fitted.named_parameters():
        if name.endswith("weight") and "norm" not in name:
            assert not torch.equal(weight, run.model.get_parameter(name)), name
