"""Tasks: their rows, which depend only on a key, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from glassformer.errors import RequestError
from glassformer.text import prepare
from glassformer.text.corpora import open_corpus
from glassformer.text.tasks import Induction, Regression, Rows, SelectiveCopy, Task, task_of

NAMES = ["induction", "selective-copy", "icl-regression", "icl-regression:layout=apart,noise=0.5", "induction:seed=3",
         "icl-regression:mixture=4"]  # fmt: skip


def alike(a: Rows, b: Rows) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_a_function_of_task_and_key(name: str) -> None:
    task = task_of(name)
    rows = task.rows(8, "training", 0, 5)
    assert alike(rows, task.rows(8, "training", 0, 5)) and str(task_of(str(task))) == str(task)
    for other in (task.rows(8, "training", 1, 5), task.rows(8, "training", 0, 6), task.rows(8, "held out")):
        assert not np.array_equal(rows.inputs, other.inputs)
    assert rows.inputs.shape[:2] == rows.targets.shape == rows.asked.shape == (8, task.length)


def test_a_block_is_repeated_and_its_length_is_drawn() -> None:
    task = Induction(symbols=40, row=60, least=5, most=20)
    rows = task.rows(300, 0)
    text = np.concatenate([rows.inputs, rows.targets[:, -1:]], axis=1)
    assert rows.asked.all() and np.array_equal(text[:, 1:], rows.targets) and set(text.ravel()) == set(range(40))
    periods = [next(p for p in range(1, 61) if np.array_equal(row[p:], row[:-p])) for row in text]
    assert min(periods) == 5 and max(periods) == 20 and len(set(periods)) == 16


def test_selective_copy_targets_are_the_symbols_in_order() -> None:
    task = SelectiveCopy(symbols=5, row=30, kept=6)
    rows = task.rows(50, 0)
    assert rows.asked.sum() == 50 * 6 and rows.asked[:, 30:].all()
    for read, answer in zip(rows.inputs, rows.targets, strict=True):
        assert np.array_equal(read[:30][read[:30] < 5], answer[30:]) and (read[30:] == 6).all()
    places = np.nonzero(rows.inputs[:, :30] < 5)[1]
    assert np.bincount(places, minlength=30).min() > 0


def test_regression_targets_are_linear_in_the_inputs() -> None:
    joined = Regression(dims=3, examples=8).rows(20, 0)
    assert joined.inputs.shape == (20, 9, 4) and joined.asked.sum() == 20 and not joined.inputs[:, -1, -1].any()
    for read, answer in zip(joined.inputs, joined.targets, strict=True):
        w = np.linalg.lstsq(read[:-1, :3], read[:-1, 3], rcond=None)[0]
        np.testing.assert_allclose(read[:, :3] @ w, answer, atol=1e-9)
    apart = Regression(dims=3, examples=8, layout="apart").rows(20, 0)
    assert apart.inputs.shape == (20, 17, 3) and np.array_equal(apart.asked[0], np.arange(17) % 2 == 0)
    np.testing.assert_array_equal(apart.inputs[:, 1::2, 0], apart.targets[:, 0:-1:2])
    noisy = Regression(dims=3, examples=2000, noise=0.5).functions(4, np.random.default_rng(0))
    assert np.std(noisy[2] - noisy[1]) == pytest.approx(0.5, rel=0.05)


def test_rows_of_a_mixture_share_its_functions() -> None:
    task = Regression(dims=3, examples=8, mixture=4)
    found = [np.linalg.lstsq(row[:-1, :3], row[:-1, 3], rcond=None)[0] for row in task.rows(200, 0).inputs]
    nearest = np.abs(np.array(found)[:, None] - task.mixed).max(-1)
    assert nearest.min(1).max() < 1e-9 and np.bincount(nearest.argmin(1), minlength=4).min() > 25
    assert not np.array_equal(task.mixed, Regression(dims=3, mixture=4, seed=1).mixed)
    assert np.array_equal(task.mixed, Regression(dims=3, mixture=4, noise=0.5).mixed)


@pytest.mark.parametrize(("name", "row"), [("induction", 65), ("selective-copy", 64 + 1 + 8)])
def test_task_corpus_has_rows_and_name(name: str, row: int, tmp_path: Path) -> None:
    text = prepare(name, cache_dir=tmp_path)
    assert text.train.task == text.validation.task == name and text.describe()["task"] == name
    assert text.train.documents + text.validation.documents == 20_000 and text.tokenizer.kind == "char"
    first = text.tokenizer.decode(text.train.tokens[: row + 1].tolist())
    assert len(first) == row and ("\t" in first) == (name == "selective-copy")
    assert open_corpus("number-words").fingerprint == open_corpus("pairs:numbers").fingerprint
    assert open_corpus("induction:seed=1").fingerprint != open_corpus("induction").fingerprint


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("induction:symbol=3", "did you mean 'symbols'"), ("induction:symbols", "is not a field"),
        ("induction:symbols=1", "2 to 64"), ("induction:symbols=x", "not a whole number"),
        ("induction:least=40", "least <= most"), ("selective-copy:kept=99", "kept <= row"),
        ("icl-regression:layout=odd", "use joined or apart"), ("icl-regression:noise=-1", "from 0 up"),
        ("icl-regression:noise=nan", "from 0 up"), ("icl-regression:examples=0", "examples=0"),
        ("icl-regression:mixture=-1", "mixture=-1"),
        ("inductoin", "did you mean 'induction'"),
        ("induction:row=99999999", "row=99999999"),
    ],
)  # fmt: skip
def test_unknown_task_is_refused(data: str, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        open_corpus(data)
    assert said in str(refused.value)


def test_every_task_is_a_value() -> None:
    assert isinstance(task_of("induction:row=32,most=16"), Task)
    assert str(Induction(row=32, most=16)) == "induction:row=32,most=16"
