"""Arguments of public functions against their annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import glassformer as gf
from glassformer.training import Callback
from tests.refused import refused

M = "gpt2@0.1m+layers=1+d_model=32+heads=2"


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("callbacks", lambda: gf.train(M, "x.txt", tokens=1, callbacks=Callback())),  # type: ignore[arg-type]
        ("progress", lambda: gf.train(M, "x.txt", tokens=1, progress=None)),  # type: ignore[arg-type]
        ("tokenizer", lambda: gf.train(M, "x.txt", tokens=1, tokenizer=None)),  # type: ignore[arg-type]
        ("executor", lambda: gf.compare([M], "x.txt", tokens=1, executor="here")),  # type: ignore[arg-type]
        ("price", lambda: gf.plan(M, machine="h100", price=2.5)),  # type: ignore[call-overload]
        ("nodes", lambda: gf.plan(M, machine="h100", nodes="2")),  # type: ignore[call-overload]
        ("run", lambda: gf.why(3)),  # type: ignore[arg-type]
        ("names", lambda: gf.claims(3)),  # type: ignore[arg-type]
        ("tolerance", lambda: gf.check(M, tolerance="x")),  # type: ignore[arg-type]
        ("out", lambda: gf.convert(M, None)),  # type: ignore[arg-type]
        ("where", lambda: gf.scale(None, "x.csv", where=["a"])),  # type: ignore[arg-type]
        ("changes", lambda: gf.ablate(M, "x.txt", changes=3)),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_another_type_is_refused_by_name(field: str, call: Callable[[], Any]) -> None:
    with refused(code="type", field=field):
        call()


def test_numbers_of_numpy_and_paths_are_taken(tmp_path: Path) -> None:
    assert gf.plan(M, batch=np.int64(2)).to_dict() == gf.plan(M, batch=2).to_dict()
    (file := tmp_path / "a.yaml").write_text(gf.preset(M).to_yaml())
    assert gf.preset(file) == gf.preset(M)


def test_an_unknown_argument_is_answered_with_the_near_one() -> None:
    with refused(code="unknown", field="dtypes") as caught:
        gf.load(M, dtypes="float32")  # type: ignore[call-arg]
    assert "dtype" in str(caught.value)
    with refused(code="missing", field="arguments"):
        gf.load()  # type: ignore[call-arg]
    assert inspect.signature(gf.load).parameters.keys() >= {"dtype", "device"}


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("banana", lambda: gf.Recipe(tokens=1, banana=3)),  # type: ignore[call-arg]
        ("learning_rate", lambda: gf.Recipe(tokens=1, learning_rate="fast")),  # type: ignore[arg-type]
        ("banana", lambda: gf.preset(M).replace(banana=1)),
        ("context", lambda: gf.ModelConfig(vocab_size=8, d_model=3)),  # type: ignore[call-arg]
    ],
)
def test_a_value_made_by_its_class_refuses_as_files_do(field: str, make: Callable[[], Any]) -> None:
    with pytest.raises(gf.RequestError) as caught:
        make()
    assert field in str(caught.value.field)
