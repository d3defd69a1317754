"""Tests of a device in Python (tests/test_device.py), on a GPU, up to rounding."""

from __future__ import annotations

import pytest

from tests import gpu as gpu
from tests import test_device
from tests.test_device import (
    test_capture_and_edits,
    test_check,
    test_readings,
    test_states_and_rows_of_unequal_length,
    test_weights_are_initialised_on_the_requested_device,
)
from tests.test_generic import EVERY, Case

__all__ = [
    "test_capture_and_edits",
    "test_check",
    "test_readings",
    "test_states_and_rows_of_unequal_length",
    "test_weights_are_initialised_on_the_requested_device",
]
ROUNDING = 3e-4
"""Numbers in fp32 whose sums are taken in another order."""
alike = test_device.alike


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture(autouse=True)
def but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        test_device, "alike", lambda here, there, tolerance=0.0: alike(here, there, max(tolerance, ROUNDING))
    )


@pytest.mark.parametrize("case", [case for case in EVERY if "longformer" not in str(case)], ids=str)
def test_models_and_gradients(case: Case, device: str):
    """Models of longformer, whose projections of global tokens learn only with global tokens, are in test_models.py."""
    test_device.test_models_and_gradients(case, device)


@pytest.mark.parametrize("asked", ["greedy", "penalties", "bias"])
@pytest.mark.parametrize("rows", ["tensor", "lists"])
def test_texts(asked: str, rows: str, device: str):
    """Only greedy texts: random numbers of a GPU differ from those of a CPU."""
    test_device.test_texts(test_device.ASKED[asked], rows, device)


@pytest.mark.parametrize("written", ["beams", "forked", "int8", "int4", "prompt lookup", "draft"])
def test_other_ways_to_write(written: str, device: str):
    test_device.test_other_ways_to_write(test_device.OTHERS[written], device)
