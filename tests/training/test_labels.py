"""Classes of texts and spans as answers: losses of the published heads, what is refused, and what a run keeps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.errors import Code
from glassformer.generation.spans import best_span
from glassformer.runs.answers import shared_words
from glassformer.text.data import TextData, prepare
from glassformer.training.objectives import ClassesConfig, SpansConfig
from glassformer.training.objectives.classes import LabelledTexts, labels_of
from glassformer.training.objectives.spans import Questions
from tests.refused import refused

TINY = "bert@1m+layers=1+d_model=16+heads=2"
TOWNS = ("Rome", "Oslo", "Bern", "Zürich", "Lyon", "Ulm")


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    rows = [{"text": f"{'a good' if i % 2 else 'an awful'}\tfilm {i}", "label": i % 2} for i in range(60)]
    return lines(tmp_path / "reviews.jsonl", rows)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    draw, rows = random.Random(0), []
    for i in range(40):
        one, other = draw.sample(TOWNS, 2)
        context, asked = f"Anna {i} lives in {one}, and Élodie lives in {other}.", "Where does Élodie live?"
        rows.append({"context": context, "question": asked, "answer": other, "start": context.rindex(other)})
    return lines(tmp_path / "questions.jsonl", rows)


def read(objective: ClassesConfig | SpansConfig, path: Path, tokenizer: str) -> TextData:
    return prepare(objective.data(str(path)), tokenizer)


def test_the_loss_of_classes_is_that_of_the_published_head(reviews: Path) -> None:
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    objective = ClassesConfig()
    text = read(objective, reviews, "byte")
    model = gf.preset(f"{TINY}+classes:2+vocab_size=257+context=32").build(seed=0).eval()
    batch = objective.batches(text, 8, 32, 0)[0]
    logits = model(batch.inputs, **batch.beside)
    assert logits.shape == (8, 2) and set(batch.targets.tolist()) == {0, 1}
    settings = SimpleNamespace(num_labels=2, problem_type="single_label_classification")
    theirs = loss_utils.ForSequenceClassificationLoss(batch.targets, logits, settings)
    torch.testing.assert_close(objective.loss(model, batch), theirs)
    each = objective.loss(model, batch, reduction="none")
    torch.testing.assert_close(each.mean(), theirs)


def test_padding_and_a_tab_in_a_text_change_nothing(reviews: Path) -> None:
    text = read(ClassesConfig(), reviews, "byte")
    texts = LabelledTexts(text.train.tokens, text.tokenizer, 32, labels_of(text))
    assert texts.labels == ("0", "1")
    known = {bytes(texts.field(i, 0).tolist()).decode().rsplit(" ", 1)[0] for i in range(len(texts))}
    assert known == {"a good film", "an awful film"}
    model = gf.preset(f"{TINY}+classes:2+vocab_size=257+context=32").build(seed=0).eval()
    whole = texts.batch(range(8))
    assert (whole.beside["documents"] == 0).any()
    together = model(whole.inputs, **whole.beside)
    for i in range(8):
        one = texts.batch([i])
        torch.testing.assert_close(model(one.inputs, **one.beside)[0], together[i], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe:300"])
def test_a_span_is_the_answer(questions: Path, tokenizer: str) -> None:
    """In texts with characters of two bytes too, and with tokens of several characters."""
    text = read(SpansConfig(), questions, tokenizer)
    found = Questions(text.train, text)
    batch = found.batch(range(len(found)))
    decode = text.tokenizer.decode
    for number, (inputs, (first, last)) in enumerate(zip(batch.inputs, batch.targets.tolist(), strict=True)):
        answer = decode(found.field(number, 2).tolist())
        assert answer in decode(inputs[first : last + 1].tolist())
        assert answer not in decode(inputs[first + 1 : last + 1].tolist())
        assert answer not in decode(inputs[first:last].tolist())
    real = batch.beside["documents"][0].bool()
    assert decode(batch.inputs[0][real].tolist()).startswith("Where does Élodie live?\tAnna")
    assert batch.beside["segments"][0].sum() == len(found.field(0, 0))


def test_the_loss_of_spans_is_that_of_the_published_head(questions: Path) -> None:
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    objective = SpansConfig()
    text = read(objective, questions, "byte")
    model = gf.preset(f"{TINY}+spans+vocab_size=257+context=128").build(seed=0).eval()
    batch = Questions(text.train, text).batch([0])  # the published loss counts padding, so one row without any
    start, end = model(batch.inputs, segments=batch.beside["segments"]).unbind(-1)
    theirs = loss_utils.ForQuestionAnsweringLoss(start, end, batch.targets[:, 0], batch.targets[:, 1])
    torch.testing.assert_close(objective.loss(model, batch), theirs)
    padded = Questions(text.train, text).batch(range(8))
    torch.testing.assert_close(objective.loss(model, padded, "none")[0].mean(), theirs)


def test_the_best_span_is_that_of_all_pairs() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 2)
    shares = logits.softmax(0)
    pairs = {(i, j): float(shares[i, 0] * shares[j, 1]) for i in range(2, 8) for j in range(i, 8)}
    right = max(pairs, key=lambda pair: pairs[pair])
    first, last, probability = best_span(logits, 2, 8)
    assert (first, last) == right and probability == pytest.approx(pairs[right], rel=1e-5)


def test_shared_words_are_those_of_squad() -> None:
    assert shared_words("the Eiffel Tower", "Eiffel tower!") == 1.0
    assert shared_words("in the old town", "old town hall") == pytest.approx(2 / 3)
    assert shared_words("Rome", "Oslo") == 0.0


@pytest.mark.parametrize(
    ("model", "objective", "code", "field"),
    [
        ("gpt2@1m+classes:2", "classes", "causal", "head.pool"),
        (f"{TINY}+classes:3", "classes", "conflict", "head.classes"),
        (TINY, "classes", "conflict", "head"),
        (f"{TINY}+classes:2", "next_token", "conflict", "head"),
        ("gpt2@1m+spans", "spans", "causal", "objective"),
        (f"{TINY}+classes:2", "spans", "conflict", "head"),
    ],
)
def test_unlearnable_labels_are_refused(reviews: Path, model: str, objective: str, code: Code, field: str) -> None:
    with refused(code=code, field=field):
        gf.train(model, str(reviews), steps=1, context=32, objective=objective, progress=False)


def test_answer_at_another_place_is_refused(tmp_path: Path) -> None:
    rows = [{"context": f"{i} Rome", "question": "Where?", "answer": "Rome", "start": 0} for i in range(20)]
    with refused(code="conflict", field="data.start"):
        gf.train(f"{TINY}+spans", str(lines(tmp_path / "q.jsonl", rows)), steps=1, context=32, progress=False)


def test_a_run_on_labels_classifies_and_embeds(reviews: Path, tmp_path: Path) -> None:
    """Without an objective: the head says which. Labels are kept by name, in a published folder too."""
    out = tmp_path / "run"
    run = gf.train(
        f"{TINY}+classes:2", str(reviews), steps=2, context=32, batch_size=8, out=out, progress=False, tokenizer="byte"
    )
    assert run.recipe.objective == ClassesConfig()
    stored = json.loads((out / "answers.json").read_text())
    held_out = LabelledTexts(read(ClassesConfig(), reviews, "byte").validation.tokens, run.tokenizer, 32)
    rows = [held_out.names.count(label) for label in ("0", "1")]
    assert np.sum(stored["confusion"], 1).tolist() == rows and stored["pairs"] == sum(rows)
    assert np.trace(stored["confusion"]) / stored["pairs"] == pytest.approx(stored["exact"])
    assert "Held-out texts by the class" in (out / "report.html").read_text()
    loaded = gf.load(out)
    assert loaded.config.head.labels == ("0", "1")
    found = loaded.classify(["a good film", "an awful film 7"])
    tokens = torch.tensor([list(b"a good film")])
    logits = loaded.model(tokens)[0].softmax(-1)
    assert list(found[0].probabilities.values()) == pytest.approx(logits.tolist(), abs=1e-5)
    assert found[0].probability == max(found[0].probabilities.values())
    assert gf.classify(loaded, ["a good film"], progress=False).found[0].label == found[0].label
    assert loaded.embed(["a good film"]).shape == (1, 16)
    gf.save(loaded.model, loaded.tokenizer, tmp_path / "published")
    assert gf.load(tmp_path / "published").config.head.labels == ("0", "1")
    with refused(code="conflict", field="model"):
        loaded.answer("Where?", "Here.")


def test_a_run_on_questions_answers(questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = gf.train(f"{TINY}+spans", str(questions), steps=2, context=128, batch_size=8, out=out, progress=False)
    assert run.recipe.objective == SpansConfig() and 0 <= run.answers.exact <= run.answers.overlap <= 1
    context = "Anna lives in Rome, and Élodie lives in Bern."
    loaded = gf.load(out)
    found = loaded.answer("Where does Anna live?", context)
    assert found.text and found.text in context and 0 < found.probability <= 1
    with refused(code="conflict", field="model"):
        loaded.classify(["a text"])
