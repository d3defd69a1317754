"""Scores of heads by meaning, against plain loops over captured maps and heads that were made for them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer.lens.meaning import KINDS, MEN, TEMPLATES, WOMEN, places_of, sentence
from glassformer.model import Model
from glassformer.text import ByteTokenizer, Tokenizer
from tests.refused import refused

TINY = "layers=2+d_model=32+heads=4+context=128+vocab_size=257"
BYTES = ByteTokenizer()


def tiny(expression: str) -> Model:
    return gf.preset(f"{expression}+{TINY}").build(seed=0).eval()


def sentences(kind: str, n: int, seed: int = 0) -> list[Any]:
    draw = Random(f"{seed} {kind}")
    return [sentence(kind, row, draw) for row in range(n)]


@pytest.mark.parametrize("expression", ["gpt2@1m", "llama@1m+gqa:2", "gpt2@1m+bidirectional"])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_means_over_the_marked_places(expression: str, kind: str):
    model, n = tiny(expression), 4
    found = gf.lens.meaning_scores(model, BYTES, n=n, seed=3, kinds=kind)
    assert list(found.scores) == [kind]
    right, other = torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64)
    for pieces in sentences(kind, n, seed=3):
        ids = list("".join(text for text, _ in pieces).encode())
        spans, at = list[tuple[str, range]](), 0
        for text, role in pieces:
            spans.append((role, range(at, at + len(text))))
            at += len(text)
        maps = gf.capture(model, torch.tensor([ids]), "layers.*.mixer.pattern")
        queries = [span[-1] for role, span in spans if role == "query"]
        keys = {
            "right": [i for role, span in spans if role == "right" for i in span],
            "other": [i for role, span in spans if role == "other" for i in span]
            + [span[-1] for role, span in spans if role == "end"],
        }
        for role, sums in (("right", right), ("other", other)):
            for layer in range(2):
                a = maps[f"layers.{layer}.mixer.pattern"][0].double()
                for head in range(4):
                    mass = sum(float(a[head, i, j]) for i in queries for j in keys[role])
                    sums[layer, head] += mass / len(queries) / n
    torch.testing.assert_close(found.scores[kind], right, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(found.leads[kind], right - other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", ["subject", "reference"])
def test_a_head_that_finds_the_word_has_score_and_lead_of_one(kind: str):
    """Its map is put in by hand, with that of a head that reads the nearest candidate: that one has no lead."""
    model, n = tiny("gpt2@1m"), 4
    rows = iter([places_of(BYTES, pieces)[1] for pieces in sentences(kind, n)])

    def look(pattern: Tensor) -> Tensor:
        places, made = next(rows), torch.eye(pattern.shape[-1]).expand_as(pattern).clone()
        nearest = max(places["right"][-1], places["other"][-1])
        for head, key in ((1, places["right"][0]), (2, nearest)):
            made[:, head] = 0.0
            made[:, head, :, key] = 1.0
        return made

    with gf.edit(model, {"layers.1.mixer.pattern": look}):
        found = gf.lens.meaning_scores(model, BYTES, n=n, kinds=(kind,))
    assert found.scores[kind][1].tolist() == [0, 1, 0.5, 0]
    assert found.leads[kind][1].tolist() == [0, 1, 0, 0]
    assert f"{kind}: layer 1 head 1 1.00 (+1.00)" in str(found)


def test_every_word_of_a_sentence_agrees():
    """A verb agrees with its subject and not with the other noun; a pronoun has the sex of its antecedent only."""
    for pieces in sentences("subject", 40):
        words = {role: text.strip() for text, role in pieces if role}
        plural = words["right"].endswith("s")
        assert words["other"].endswith("s") != plural and words["query"].endswith("s") != plural
    for pieces in sentences("reference", 40):
        words = {role: text.strip() for text, role in pieces if role}
        own, others = (WOMEN, MEN) if words["query"] == "she" else (MEN, WOMEN)
        assert words["right"] in own and words["other"] in others
    for kind in KINDS:
        orders = [[role for _, role in pieces if role in ("right", "other")] for pieces in TEMPLATES[kind]]
        assert kind == "punctuation" or orders[0] == orders[1][::-1]


def test_unscorable_requests_are_refused():
    with refused(code="unknown", field="kinds"):
        gf.lens.meaning_scores(tiny("gpt2@1m"), BYTES, kinds=("verb",))
    with refused(code="range", field="n"):
        gf.lens.meaning_scores(tiny("gpt2@1m"), BYTES, n=0)
    with refused(code="unsupported", field="model"):
        gf.lens.meaning_scores(gf.preset(f"llama@1m+{TINY}+mamba").build(seed=0), BYTES)

    class Joining(ByteTokenizer):
        """A tokenizer that reads a text as one token."""

        def encode(self, text: str, *given: Any, **named: Any) -> Any:
            return torch.tensor([len(text) % 257]).numpy()

    joining: Tokenizer = Joining()
    with refused(code="unsupported", field="tokenizer"):
        gf.lens.meaning_scores(tiny("gpt2@1m"), joining)


def test_a_reading_prints_and_draws_itself():
    found = gf.lens.meaning_scores(gf.preset(f"llama@1m+{TINY}+stack:mamba,attention").build(seed=0), BYTES, n=2)
    assert found.scores["subject"][0].isnan().all() and set(found.to_dict()["examples"]) == set(KINDS)
    assert found.figure() is not None and str(found).count("\n") == 3
