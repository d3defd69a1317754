"""Generated pairs have the right answers, and are the same everywhere."""

from __future__ import annotations

import datetime
from itertools import islice

import pytest

from glassformer.text import open_corpus
from glassformer.text.languages import COUNT, LANGUAGES, pairs, words
from tests.refused import refused


def test_numbers_are_those_of_english():
    """Numbers are written as in dictionaries."""
    spelled = {
        0: "zero", 13: "thirteen", 40: "forty", 99: "ninety-nine", 100: "one hundred",
        342: "three hundred forty-two", 1000: "one thousand", 21_042: "twenty-one thousand forty-two",
        700_015: "seven hundred thousand fifteen",
        999_999: "nine hundred ninety-nine thousand nine hundred ninety-nine",
    }  # fmt: skip
    assert {n: words(n) for n in spelled} == spelled
    assert len({words(n) for n in range(20_000)}) == 20_000


def test_targets_of_language_tasks_are_correct():
    for source, target in pairs("numbers", 500):
        assert words(int(target)) == source
    for source, target in pairs("dates", 500):
        assert datetime.datetime.strptime(source, "%d %B %Y").date().isoformat() == target
    for source, target in pairs("reversal", 500):
        assert list(reversed(source)) == list(target)


@pytest.mark.parametrize("language", LANGUAGES)
def test_pairs_are_a_function_of_the_seed(language: str):
    first, again, other = (list(pairs(language, 300, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert first[:50] == list(pairs(language, 50, 1)) and len({source for source, _ in first}) == 300


def test_the_corpus_has_each_pair_as_a_document():
    corpus = open_corpus("pairs:reversal")
    texts = ["".join(document.pieces()) for document in corpus.documents()]
    assert texts[:20] == ["\t".join(pair) for pair in islice(pairs("reversal"), 20)]
    assert len(texts) == len({text.partition("\t")[0] for text in texts}) == COUNT
    assert len({open_corpus(f"pairs:{name}").fingerprint for name in LANGUAGES}) == len(LANGUAGES)


def test_another_language_is_refused():
    with refused(code="unknown", field="data") as caught:
        open_corpus("pairs:number")
    assert "numbers" in str(caught.value) and "\n" not in str(caught.value)
