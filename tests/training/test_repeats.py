"""Notes on text that is read many times, and on held-out text that training reads too."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import glassformer as gf
from glassformer.text import prepare, prepare_ids
from glassformer.training import Recipe
from glassformer.training.repeats import MOST_PASSES, passes, repeat_notes, shared, shared_notes

SHAPE = {"batch_size": 4, "context": 32, "threads": 1}


def words(seed: int, count: int) -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefgh", k=draw.randint(2, 9))) for _ in range(count))


@pytest.mark.parametrize("copies", [1, 4])
def test_held_out_text_that_is_training_text_is_found(copies: int, tmp_path: Path):
    (tmp_path / "text.txt").write_text("\n".join([words(0, 1500)] * copies))
    text = prepare(tmp_path / "text.txt", "char", cache_dir=tmp_path / "cache")
    assert shared(text) == (1.0 if copies > 1 else 0.0)
    assert len(shared_notes(text)) == (copies > 1)


def test_half_of_the_held_out_ids_may_be_training_ids(tmp_path: Path):
    draw = np.random.default_rng(0)
    train = draw.integers(0, 200, 20_000).astype(np.uint16)
    held_out = np.concatenate([train[5_001:9_001], draw.integers(0, 200, 4_000).astype(np.uint16)])
    text = prepare_ids(train, "byte", tmp_path, validation=held_out)
    assert 0.4 < shared(text) < 0.6


def test_shared_documents_are_found_though_each_is_short(tmp_path: Path):
    documents = [words(i, 30) for i in range(40)]
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(documents))
    text = prepare(tmp_path / "a.txt", "char", cache_dir=tmp_path / "cache")
    assert text.validation.documents > 1 and shared(text) == 0.0
    twins = prepare_ids(text.train.tokens, text.tokenizer, tmp_path / "cache", validation=text.train.tokens[1:2_000])
    assert shared(twins) == 1.0


def test_repeated_text_is_noted_before_and_after_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "text.txt").write_text(words(1, 300))
    text = prepare(tmp_path / "text.txt", "char", cache_dir=tmp_path / "cache")
    size, config = len(text.train), gf.preset("llama@0.1m")
    few, many = (Recipe.of(tokens=int(times * size), **SHAPE) for times in (2, 3 * MOST_PASSES))
    assert passes(few, config, text) == pytest.approx(2, rel=0.05)
    assert not repeat_notes({"a": passes(few, config, text), "b": None})
    assert "12" in repeat_notes({"a": passes(many, config, text)})[0]
    assert passes(Recipe.of(epochs=7, **SHAPE), config, text) == 7
    run = gf.train("llama@0.1m", text, epochs=5, out=tmp_path / "run", **SHAPE)
    assert run.passes == pytest.approx(5, rel=0.1)
    assert "is read 5 times" in capsys.readouterr().err
    assert f"it has read the text {run.passes:.3g} times" in str(run) and "not more --tokens" in str(run)
    once = gf.train("llama@0.1m", text, epochs=1, out=tmp_path / "once", **SHAPE)
    assert "passes" not in str(once) and "is read" not in capsys.readouterr().err
