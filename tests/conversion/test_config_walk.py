"""Each field of the published config classes, changed: the same logits, or a refusal or warning.

A field is tried at some values that its class takes and with which its model computes; those that the class refuses are
left out."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

import glassformer as gf
from glassformer.conversion.families import FAMILIES
from glassformer.errors import RequestError

from .cases import CASES
from .test_parity import answer, drawn, ours_of, theirs

SEED = 3
FIRST_TOKEN = 8
"""Least token of the texts: ids below may be tried as that of padding."""
BOUND = 1e-4
"""Largest error, of the largest logit."""
RECORDS = {
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "return_dict",
    "id2label", "label2id", "num_labels",
}  # fmt: skip
"""Fields of every class that name a file or a class, or the form of a call."""
WORDS = ("relu", "silu", "gelu_new", "none")


def others(value: Any) -> list[Any]:
    """Returns values like this one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 0, 2 * value]
    if isinstance(value, float):
        return [1.5 * value + 0.125, 0.0, 1.0]
    if isinstance(value, str):
        return [word for word in WORDS if word != value]
    if isinstance(value, dict):
        return [{**value, key: one} for key, said in value.items() for one in others(said)[:2]]
    if isinstance(value, list) and value:
        return [[value[0]] * len(value), [value[-1]] * len(value), value[::-1]]
    return [True, 3, 0.5, [1]] if value is None else []


@cache
def drawn_for(family: str) -> dict[str, Any]:
    """Returns the fields of a small model, drawn as for the proofs of the family: the third, which is not the least."""
    found: list[dict[str, Any]] = []

    @settings(max_examples=3, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(fields=CASES[family].fields)
    def draw(fields: dict[str, Any]) -> None:
        found.append(fields)

    draw()
    return found[-1]


def fields_of(family: str) -> dict[str, Any]:
    """Returns a copy of the fields, because published classes write into the mappings that they are given."""
    return deepcopy(drawn_for(family))


def changes(family: str) -> Iterator[tuple[str, Any]]:
    fields = fields_of(family)
    config = CASES[family].model(fields, SEED).config
    for key, value in config.to_dict().items():
        if key not in RECORDS:
            yield from ((key, one) for one in others(value) if one != value)


def outcome(family: str, key: str, value: Any, plain: Any, tokens: Tensor, place: Path) -> float | str | None:
    """Returns the error of our logits, what was said in their place, or None where theirs cannot be computed."""
    try:
        other = CASES[family].model({**fields_of(family), key: value}, SEED)
        with torch.no_grad():
            expected = answer(other(**theirs(plain, tokens, family)))
        shutil.rmtree(place, ignore_errors=True)
        other.save_pretrained(place)
    except Exception:
        return None
    if not bool(expected.isfinite().all()):
        return None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            mine = gf.load(place, dtype=torch.float32).model
        except RequestError as refused:
            return str(refused)
    if sentences := [str(one.message) for one in told if key in str(one.message)]:
        return sentences[0]
    FAMILIES[family].as_ours(other, mine)
    with torch.no_grad():
        found = answer(mine(**ours_of(plain, tokens, family)))
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def walk(family: str, place: Path) -> tuple[int, list[tuple[str, Any, float]]]:
    """Returns the number of changes that the published class computes, and those in which ours differs unsaid."""
    other = CASES[family].model(fields_of(family), SEED)
    other.save_pretrained(place)
    plain = gf.load(place, dtype=torch.float32).model
    case = replace(CASES[family], first_token=max(CASES[family].first_token, FIRST_TOKEN))
    tokens = drawn(case, other.config, torch.Generator().manual_seed(SEED))
    tried, wrong = 0, []
    for key, value in changes(family):
        found = outcome(family, key, value, plain, tokens, place)
        tried += found is not None
        if isinstance(found, float) and not found <= BOUND:
            wrong.append((key, value, found))
    return tried, wrong


@pytest.mark.parametrize("family", sorted(CASES))
def test_each_field_gives_the_same_logits_or_is_named(family: str, tmp_path: Path) -> None:
    tried, wrong = walk(family, tmp_path / "model")
    assert not wrong and tried > 20
