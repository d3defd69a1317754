"""Answers of a model to held-out sources, and their scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.runs.answers import answers, greedy, scores
from glassformer.text import prepare
from glassformer.training import train
from glassformer.training.objectives import Asked
from glassformer.training.objectives.base import Opening

TRANSLATOR = "transformer@1m+layers=2+d_model=96+heads=4+pre+residual.dropout=0+embedding.dropout=0+head.smoothing=0"


def test_scores_are_those_of_sacrebleu():
    """Values from its command line and its own documentation's example (Post 2018, 1804.08771)."""
    pytest.importorskip("sacrebleu")
    right = ["The dog bit the man.", "It was not unexpected.", "The man bit him first."]
    written = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
    found = scores(written, right)
    assert found["bleu"] == pytest.approx(45.07, abs=0.005)  # one reference of its README's two
    assert 50 < found["chrf"] < 70 and found["signatures"][0].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    assert scores(right, right)["bleu"] == pytest.approx(100)


def test_chinese_is_cut_as_sacrebleu_cuts_it():
    """By signs: 3 of 4 agree, 2 pairs of 3, 1 of 2, and 0 of 1, which sacrebleu counts as a half (Post 2018)."""
    pytest.importorskip("sacrebleu")
    found = scores(["打开文章"], ["打开文件"])
    assert "tok:zh" in found["signatures"][0]
    assert found["bleu"] == pytest.approx(100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25)
    german = ["Datei", "Ordner", "文件"]
    assert "tok:13a" in scores(german, german)["signatures"][0]


def test_scores_without_sacrebleu_are_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu", None)
    assert scores(["a"], ["a"]) == {"bleu": None, "chrf": None, "signatures": []}


@pytest.mark.parametrize("model", [TRANSLATOR, "gpt2@1m+layers=2+d_model=32+heads=2"])
def test_answers_are_those_of_generate(model: str):
    """Answers of a batch, each cut at its end, equal those of one source after the other."""
    text = prepare("pairs:reversal", "char")
    recipe: dict[str, Any] = {"steps": 1, "batch_size": 2, "context": 32, "objective": "seq2seq", "device": "cpu"}
    recipe |= {"evaluation_tokens": 64}
    run = train(gf.preset(model), text, recipe)
    found = answers(run.model, text, run.recipe.objective, 32, pairs=8)
    assert found is not None and found.pairs == 8 and found.exact == 0
    eos, decode, encode = text.tokenizer.eos_id, text.tokenizer.decode, text.tokenizer.encode
    assert eos is not None
    for source, target, written in found.samples:
        assert source[::-1] == target
        ids = encode(source).tolist()
        both = run.config.encoder is not None
        prompt, given = ([[eos]], [[*ids, eos]]) if both else ([[*ids, *encode("\t").tolist()]], None)
        new = gf.generate(run.model, prompt, 10, source=given)[0][len(prompt[0]) :]
        new = [int(token) for token in new]
        alone = decode(new[: new.index(eos)] if eos in new else new)
        assert written[:10] == alone[:10] and len(written) <= 2 * 10 + 8


@pytest.mark.parametrize("end", [None, 5])
def test_an_answer_has_the_room_behind_its_own_prompt(end: int | None):
    """The other prompts of a batch do not matter; learned positions end at 16."""
    model = gf.preset("gpt2@1m+layers=1+d_model=32+heads=2+vocab_size=31+context=16+init=gpt2+init.std=0.3").build(
        seed=3
    )
    drawn = torch.Generator().manual_seed(0)
    sizes = ((13, 9), (2, 9), (6, 1), (14, 2), (3, 2))
    asked = [
        Asked(Opening(torch.randint(31, (n,), generator=drawn).numpy()), np.zeros(1), np.zeros(m)) for n, m in sizes
    ]
    found = greedy(model, asked, end, 16)
    for (prompt, target), one, ids in zip(sizes, asked, found, strict=True):
        alone = gf.generate(model, [one.opening.tokens.tolist()], min(16 - prompt, 2 * target + 8), eos_id=end)[0]
        assert ids == [token for token in alone[prompt:] if token != end]
    assert end is not None or [len(ids) for ids in found] == [3, 14, 10, 2, 12]


@pytest.mark.slow
def test_a_language_is_solved():
    """Every held-out word is reversed exactly, after some minutes on one thread."""
    text = prepare("pairs:reversal", "char")
    recipe: dict[str, Any] = {
        "steps": 900, "batch_size": 96, "context": 16, "objective": "seq2seq", "learning_rate": 3e-3, "device": "cpu",
        "weight_decay": 0.01, "evaluation_tokens": 2000,
    }  # fmt: skip
    run = train(gf.preset(f"{TRANSLATOR}+embedding.scale=3"), text, recipe)
    found = answers(run.model, text, run.recipe.objective, 16, pairs=10**6)
    assert found is not None and found.pairs > 1900 and found.exact == 1.0
