"""Nearest tokens against the whole product."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import glassformer as gf
from glassformer.lens import neighbours
from glassformer.lens.neighbours import embedding_neighbours, nearest
from tests.refused import refused

MEASURES = ("cosine", "dot", "distance")


def closeness(table: torch.Tensor, token: int, by: str) -> torch.Tensor:
    """(v,) in fp64, written out."""
    rows, one = table.double(), table[token].double()
    if by == "distance":
        return -((rows - one) ** 2).sum(-1).sqrt()
    dots = (rows * one).sum(-1)
    return dots if by == "dot" else dots / ((rows**2).sum(-1) * (one**2).sum()).sqrt()


@pytest.fixture(scope="module")
def model():
    return gf.preset("gpt2@1m").replace(vocab_size=101).build(seed=0)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.sampled_from(MEASURES), st.integers(0, 2**31))
def test_chunks_make_no_difference(chunk: int, k: int, by: str, seed: int):
    table = torch.randn(50, 6, generator=torch.Generator().manual_seed(seed))
    tokens, before = [0, 17, 49], neighbours.CHUNK
    try:
        neighbours.CHUNK = chunk
        ids, found = nearest(table, table[tokens], k, by, without=torch.tensor(tokens)[:, None])  # type: ignore[arg-type]
    finally:
        neighbours.CHUNK = before
    for row, token in enumerate(tokens):
        all_of_them = closeness(table, token, by)
        order = [i for i in all_of_them.argsort(descending=True).tolist() if i != token][:k]
        assert ids[row].tolist() == order
        torch.testing.assert_close(found[row].double(), all_of_them[order], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by", MEASURES)
def test_a_planted_neighbour_is_found(model, by):
    with torch.no_grad():
        model.embedding.weight[77] = model.embedding.weight[5] * 1.01
        model.embedding.weight[5] *= 30 if by == "dot" else 1  # a long row is near to many by its product
    reading = embedding_neighbours(model, torch.tensor([5, 9]), k=3, by=by)
    assert reading.ids.shape == reading.closeness.shape == (2, 3)
    assert reading.ids[0, 0] == 77 and 5 not in reading.ids[0]
    assert (reading.closeness.diff(dim=1) <= 0).all()
    assert reading.tokens == [5, 9] and reading.words == ["5", "9"] and reading.neighbours[0][0] == "77"
    json.dumps(reading.to_dict(), allow_nan=False)


def test_the_head_and_a_tied_one():
    untied = gf.preset("llama@1m").replace(vocab_size=40)
    untied = untied.replace(head=untied.head.replace(tied=False)).build(seed=0)
    mine, heads = embedding_neighbours(untied, [3], 5), embedding_neighbours(untied, [3], 5, of="head")
    assert mine.ids.tolist() != heads.ids.tolist()
    assert embedding_neighbours(untied, 3, 5).ids.tolist() == mine.ids.tolist()
    torch.testing.assert_close(heads.closeness[0].double(), closeness(untied.head.weight, 3, "cosine")[heads.ids[0]])
    tied = gf.preset("gpt2@1m").replace(vocab_size=40)
    tied = tied.replace(head=tied.head.replace(tied=True)).build(seed=0)
    assert (
        embedding_neighbours(tied, [3], 5).to_dict()["ids"]
        == embedding_neighbours(tied, [3], 5, of="head").to_dict()["ids"]
    )


def test_arithmetic_excludes_its_operands():
    table = torch.eye(6)
    table[5] = table[0] - table[1] + table[2]
    ids, found = nearest(table, table[5:], 1, without=torch.tensor([[0, 1, 2]]))
    assert ids.tolist() == [[5]] and float(found) == pytest.approx(1.0)
    ids, _ = nearest(table, table[5:], 3, without=torch.tensor([[0, 2, 5]]))
    assert set(ids[0].tolist()) == {1, 3, 4}


def test_with_a_tokenizer_in_words(model):
    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(chr(40 + i) for i in ids)

    reading = embedding_neighbours(model, [5, 60], 4, Letters())
    assert reading.words == ["-", "d"]
    assert reading.neighbours == [[chr(40 + i) for i in row] for row in reading.ids.tolist()]
    assert str(reading).splitlines()[0] == "nearest rows of the embedding by cosine" and "'-': " in str(reading)
    pytest.importorskip("matplotlib")
    assert len(reading.figure().axes[0].texts) == 8


@pytest.mark.parametrize(
    ("tokens", "asked", "code", "field"),
    [
        ([101], {}, "range", "tokens"),
        ([-1], {}, "range", "tokens"),
        ([], {}, "range", "tokens"),
        ("ab", {}, "type", "tokens"),
        ([[1], [2, 3]], {}, "type", "tokens"),
        ([1.5], {}, "type", "tokens"),
        ([1], {"k": 0}, "range", "k"),
        ([1], {"k": 101}, "range", "k"),
        ([1], {"by": "cosin"}, "unknown", "by"),
        ([1], {"of": "heads"}, "unknown", "of"),
    ],
)
def test_refusals(model, tokens, asked, code: str, field: str):
    with refused(code=code, field=field):
        embedding_neighbours(model, tokens, **asked)
