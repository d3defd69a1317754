"""The benchmark of retrieval compares like with like."""

from __future__ import annotations

import random

import pytest

from benchmarks import embed
from benchmarks import retrieval as measured


def task(n: int = 12) -> measured.Task:
    relevant = [{0}, {3, 4, 5}, {11}]
    return measured.Task("t", ["a", "b", "c"], [f"text {i}" for i in range(n)], relevant)


def test_chance_scores_equal_random_rankings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measured, "DEEP", 6)
    draw, found, rounds = random.Random(0), dict.fromkeys(("recall@1", "recall@5", "MRR"), 0.0), 3000
    for _ in range(rounds):
        drawn = measured.scores(task(), [draw.sample(range(12), 12) for _ in range(3)])
        found = {name: value + drawn[name] / rounds for name, value in found.items()}
    for name, value in measured.of_chance(task()).items():
        assert name == "recall@10" or value == pytest.approx(found[name], abs=0.02)


def test_scores_are_by_hand():
    found = [[0, 1], [7, 8, 4, 3], [1, 2, 3, 5, 6, 7, 11]]
    assert measured.scores(task(), found) == pytest.approx(
        {"recall@1": 1 / 3, "recall@5": 2 / 3, "recall@10": 1.0, "MRR": (1 + 1 / 3 + 1 / 7) / 3}
    )


@pytest.mark.slow
def test_bodies_do_not_name_their_function():
    pairs = measured.docstrings(30)
    assert len(pairs.questions) == len(set(pairs.texts)) == 30
    for question, body in zip(pairs.questions, pairs.texts, strict=True):
        assert question not in " ".join(body.split()) and '"""' not in body.split("\n")[0]
    about = measured.topics(3)
    for question, relevant in zip(about.questions, about.relevant, strict=True):
        assert all(about.texts[i].split("***")[0].strip() != question for i in relevant)


@pytest.mark.slow
def test_sentences_are_different_ones():
    found = embed.sentences(200)
    assert len(set(found)) == 200 and all(20 <= len(one) <= 400 and one[-1] in ".!?" for one in found)
