"""Errors carry what went wrong as fields, so that a program need not read the sentence."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import glassformer as gf
from glassformer.config import ModelConfig
from glassformer.errors import RequestError, WorkError, check_whole, did_you_mean
from tests.refused import failed, refused


def test_the_sentence_is_made_of_the_fields():
    error = RequestError(code="range", field="seed", value=-1, expected="an integer in [0, 2**63)")
    assert str(error) == "seed must be an integer in [0, 2**63), got -1"
    assert (error.code, error.field, error.value) == ("range", "seed", -1)


@pytest.mark.parametrize(("value", "code"), [(0, "range"), (1.5, "type"), (True, "type"), ("2", "type")])
def test_counts(value: object, code: str):
    with pytest.raises(RequestError) as caught:
        check_whole("batch", value)
    error = caught.value
    assert (error.code, error.field, error.value, error.expected) == (code, "batch", value, "an integer >= 1")


def config_with(**fields: object) -> dict[str, object]:
    return {**gf.preset("gpt2@1m").to_dict(), **fields}


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"vocab_sise": 3}, "unknown", "vocab_sise"),
        ({"d_model": -4}, "range", "d_model"),
        ({"head": {"kind": "head", "tide": True}}, "unknown", "head.tide"),
    ],
)
def test_config_error_names_its_field(fields: dict[str, object], code: str, field: str):
    with pytest.raises(RequestError) as caught:
        ModelConfig.from_dict(config_with(**fields))
    assert (caught.value.code, caught.value.field) == (code, field)


def test_another_process_gets_the_same_error():
    error = RequestError("seed=-1 is negative", code="range", field="seed", value=-1, expected="a positive number")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (RequestError, str(error), vars(error))
    broken = pickle.loads(pickle.dumps(WorkError("the disk is full", code="disk")))
    assert (type(broken), str(broken), broken.code) == (WorkError, "the disk is full", "disk")


def test_refusal_helpers_require_code_and_field():
    with refused(code="range", field="batch") as caught:
        check_whole("batch", 0)
    assert caught.value.value == 0
    complaint = "'range', 'batch': batch=0 must be at least 1"
    with pytest.raises(AssertionError, match=complaint), refused(code="type", field="batch"):
        check_whole("batch", 0)
    with pytest.raises(AssertionError, match=complaint), refused(code="range", field="batches"):
        check_whole("batch", 0)
    with failed(code="disk") as work:
        raise WorkError("the disk is full", code="disk")
    assert str(work.value) == "the disk is full"
    with pytest.raises(AssertionError, match="'disk': the disk is full"), failed(code="memory"):
        raise WorkError("the disk is full", code="disk")


@pytest.mark.parametrize(
    ("word", "known", "hint"),
    [
        ("lr", ["learning_rate", "batch_size"], "learning_rate"),
        ("bs", ["learning_rate", "batch_size"], "batch_size"),
        ("wd", ["weight_decay", "warmup"], "weight_decay"),
    ],
)
def test_initials_name_a_field(word: str, known: list[str], hint: str) -> None:
    assert did_you_mean(word, known) == f"; did you mean {hint!r}?"
    assert did_you_mean("xy", known) == ""


@pytest.mark.parametrize(
    "value",
    [list(range(10_000)), "x" * 500, np.arange(5_000).reshape(100, 50), {"a": "b" * 200}, Path("x" * 500), (1,) * 999],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("form", ["", "data={!r} is wrong", "data={} is wrong"])
def test_a_given_value_takes_eighty_characters_of_a_sentence(value: Any, form: str) -> None:
    error = RequestError(form.format(value), code="type", field="data", value=value, expected="a text")
    assert len(str(error)) <= 80 + len("data must be a text, got ") and "\n" not in str(error)
    assert error.value is value


def test_a_path_is_written_as_its_text() -> None:
    error = RequestError(code="type", field="data", value=Path("a/b"), expected="a text")
    assert str(error) == "data must be a text, got 'a/b'"
