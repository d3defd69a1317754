from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.text.documents import Corpus, Document
from glassformer.text.held_out import Side, split
from tests.refused import refused


def corpus(texts: list[str], fingerprint: str = "f") -> Corpus:
    return Corpus("test", fingerprint, lambda: [Document(str(i), text) for i, text in enumerate(texts)])


def read(side: Side) -> list[str]:
    return [document.text for document in side.documents()]


@given(
    st.lists(st.text("abc\n", min_size=1, max_size=40), min_size=1, max_size=60),
    st.floats(0.01, 0.5),
    st.integers(0, 5),
)
@settings(deadline=None)
def test_nothing_is_lost_nothing_is_shared(texts: list[str], fraction: float, seed: int) -> None:
    parts = split(corpus(texts), fraction, seed)
    if max(map(len, texts)) < 2 and len(set(texts)) < 10:
        return  # one character cannot be divided; refused below
    train, validation = read(parts.train), read(parts.validation)
    assert train and validation and all(train) and all(validation)
    assert parts.train.bytes == sum(map(len, train)) and parts.validation.bytes == sum(map(len, validation))
    assert sum(map(len, texts)) == parts.train.bytes + parts.validation.bytes
    if parts.plan.cuts is None:
        assert not set(train) & set(validation)  # so equal documents are on one side
        assert sorted(train + validation) == sorted(texts)
        assert parts.validation.bytes <= 1.5 * fraction * sum(map(len, texts))
    else:
        heads = iter(train)
        tails = iter(validation)
        for text in texts:
            assert next(heads) + (next(tails) if len(text) > 1 else "") == text


def test_whole_documents_are_chosen_by_content_not_by_place() -> None:
    texts = [f"document {number} " + "x" * (number % 7) for number in range(200)]
    held = set(read(split(corpus(texts), 0.1).validation))
    assert 10 <= len(held) <= 30
    assert set(read(split(corpus(texts[::-1]), 0.1).validation)) == held
    assert read(split(corpus(texts), 0.1).validation) == [text for text in texts if text in held]
    assert set(read(split(corpus(texts), 0.1, seed=1).validation)) != held


def test_many_copies_of_one_document_are_never_held_out() -> None:
    texts = ["the same"] * 500 + [f"number {number}" for number in range(40)]
    parts = split(corpus(texts), 0.1)
    assert parts.plan.cuts is None
    assert "the same" not in read(parts.validation) and read(parts.validation)


def test_a_giant_among_small_ones_is_never_held_out() -> None:
    for seed in range(20):
        validation = read(
            split(corpus(["giant " * 1000] + [f"small {number}" for number in range(30)]), 0.1, seed).validation
        )
        assert validation and all(len(text) < 20 for text in validation)


def test_a_book_among_notes_is_divided_with_them() -> None:
    book = "".join(f"line {number} of a book\n" for number in range(5000))
    notes = [f"note number {number}: buy milk, eggs and {number} apples\n" * 2 for number in range(12)]
    parts = split(corpus([book, *notes]), 0.1)
    train, validation = read(parts.train), read(parts.validation)
    assert [head + tail for head, tail in zip(train, validation, strict=True)] == [book, *notes]
    assert len(validation[0]) / len(book) == pytest.approx(0.1, rel=0.01)
    assert parts.describe()["held_out"] == "the last 0.1 of each document"


def test_description_names_the_actual_held_out_share() -> None:
    texts = [f"{number:02}" + "x" * 98 for number in range(25)]
    parts = split(corpus(texts), 0.11)  # 2.75 documents of 100 bytes
    assert parts.describe()["held_out"] == "whole documents, 0.12 of the bytes (0.11 asked for)"
    assert len(read(parts.validation)) == 3
    parts = split(corpus(["book " * 200, *(f"small {number}" for number in range(10))]), 0.1)
    assert parts.describe()["held_out"] == "whole documents, 0.065 of the bytes (0.1 asked for)"
    assert (
        split(corpus(["line\n" * 10]), 0.12).describe()["held_out"] == "the last 0.1 of each document (0.12 asked for)"
    )


def test_few_documents_are_divided_at_a_line_end() -> None:
    text = "".join(f"line {number}\n" for number in range(1000))
    parts = split(corpus([text]), 0.1)
    (head,), (tail,) = read(parts.train), read(parts.validation)
    assert head + tail == text and head.endswith("\n")
    assert 0 <= len(head) - int(0.9 * len(text)) < len("line 999\n")
    assert parts.describe() == {"held_out": "the last 0.1 of each document", "documents": 1, "split_seed": 0}


def test_a_cut_that_falls_on_a_line_end_stays_there() -> None:
    assert read(split(corpus(["aaaa\nbbbb\n"]), 0.5).train) == ["aaaa\n"]
    assert read(split(corpus(["no line end here"]), 0.25).train) == ["no line end "]
    assert read(split(corpus(["end only at the end\n"]), 0.25).train) == ["end only at the"]


def test_a_cut_does_not_wander_to_a_distant_line_end() -> None:
    parts = split(corpus(["x" * 995 + "\nend"]), 0.1)
    assert 80 <= len(read(parts.validation)[0]) <= 100


def test_any_seed_divides() -> None:
    assert read(split(corpus([str(n) for n in range(50)]), 0.1, seed=10**100).validation)


def test_long_documents_are_streamed_into_their_parts() -> None:
    text = "".join(f"line {number} é\n" for number in range(60_000))  # several pieces
    source = Corpus(
        "long", "f", lambda: [Document("d", lambda: (text[i : i + 1000] for i in range(0, len(text), 1000)))]
    )
    parts = split(source, 0.2)
    assert read(parts.train) + read(parts.validation) == [
        text[: len(read(parts.train)[0])],
        text[len(read(parts.train)[0]) :],
    ]
    assert parts.validation.bytes == len(read(parts.validation)[0].encode())


@pytest.mark.parametrize("fraction", [0, -0.1, 0.51, 1, float("nan")])
def test_a_wrong_fraction_is_refused(fraction: float) -> None:
    with refused(code="range", field="held_out"):
        split(corpus(["text"]), fraction)


def test_a_text_too_short_is_refused() -> None:
    with refused(code="range", field="data"):
        list(split(corpus(["x"])).train.documents())


def test_fingerprints_depend_on_text_share_and_seed() -> None:
    a = corpus(["text"])
    sides = [
        split(a).train,
        split(a).validation,
        split(a, 0.2).train,
        split(a, seed=1).train,
        split(corpus(["u"], "g")).train,
    ]
    assert len({side.fingerprint for side in sides}) == 5
    assert split(a).train.fingerprint == split(corpus(["text"])).train.fingerprint
