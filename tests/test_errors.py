"""Errors carry what went wrong as fields, so that a program need not read the sentence."""

from __future__ import annotations

import pytest

import glassformer as gf
from glassformer.config import ModelConfig
from glassformer.errors import RequestError, check_whole


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
def test_a_config_says_which_field(fields: dict[str, object], code: str, field: str):
    with pytest.raises(RequestError) as caught:
        ModelConfig.from_dict(config_with(**fields))
    assert (caught.value.code, caught.value.field) == (code, field)
