"""One thread, fixed seeds: a test that passes once passes always."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start, too

import pytest
import torch
from hypothesis import settings

from glassformer.generation.native_step import NativeStep
from glassformer.model import Inputs, Model
from glassformer.parts.core.running import NOTHING, thread
from tests.quick import EXAMPLES, PHASE, PHASES, left_out, phase

for name, count in EXAMPLES.items():
    settings.register_profile(name, derandomize=True, deadline=None, max_examples=count, database=None)
settings.load_profile("few")
os.environ.setdefault(PHASE, str(phase()))  # of all workers
torch.set_num_threads(1)


QUICK = (
    "tests/test_house.py",
    "tests/test_known_once.py",
    "tests/parts/",
    *(
        f"tests/conversion/test_parity.py::test_in_and_out[{family}-2]"
        for family in ("bloom", "gpt2", "llama", "qwen3")
    ),
    "tests/comparison/test_compare.py::test_a_padded_vocabulary_is_trained_and_written_with",
)
"""Files and tests of `make quick`."""
NOT_QUICK = (
    "tests/parts/test_experts.py::test_compiled_it_is_the_same",
    "tests/parts/test_experts.py::test_skewed_clusters_become_level",
    "tests/parts/test_kv.py::test_ring_state_equals_full_pass_after_every_allowed_rewind",
    "tests/parts/test_mup.py::test_a_published_class_computes_the_same",
    "tests/parts/test_quantized.py::test_layout_follows_cpu_capability",
)
"""Tests among those that take seconds each."""
QUICK_GENERIC = (
    "test_every_kernel_is_the_definition",
    "test_cached_decoding_is_the_full_forward",
    "test_left_padding_changes_nothing",
    "test_logits_have_their_shape_and_every_parameter_learns",
    "test_no_token_changes_the_past",
    "test_parameters_are_counted_exactly",
    "test_a_config_survives_its_files",
)
"""Tests of tests/test_generic.py that `make quick` runs, on some of the first models, which cover the most pairs."""
FIRST = 24


def is_quick(item: pytest.Item) -> bool:
    if item.nodeid.startswith(QUICK):
        return not item.nodeid.startswith(NOT_QUICK)
    if not isinstance(item, pytest.Function) or item.originalname not in QUICK_GENERIC:
        return False
    return item.nodeid.startswith("tests/test_generic.py") and item.callspec.indices["case"] < FIRST


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in asked for asked in config.args):  # a test that is asked for by its name tries all
        for item in left_out(items, phase()):
            item.add_marker("slow")
    for item in items:
        if is_quick(item):
            item.add_marker("quick")
        for name in ("browser", "gpu"):
            if item.nodeid.startswith(f"tests/{name}/"):
                item.add_marker(name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"phase {phase()} of {PHASES}; {PHASE}={phase()} tries the same cases again")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a command that ran in this process may have taken all cores
    yield
    left, thread.now = thread.now, NOTHING
    assert left is NOTHING or astuple(left) == astuple(NOTHING), f"the test has left {left} for those after it"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens of each pass of a model, by its own code or by native instructions."""
    lengths: list[int] = []
    whole, native = Model.states_of, NativeStep.__call__

    def noted(self: Model, given: Inputs, *rest: Any) -> torch.Tensor:
        lengths.append(given.tokens.shape[1])
        return whole(self, given, *rest)

    def noted_step(self: NativeStep, model: Model, tokens: torch.Tensor, state: Any) -> torch.Tensor:
        lengths.append(tokens.shape[1])
        return native(self, model, tokens, state)

    monkeypatch.setattr(Model, "states_of", noted)
    monkeypatch.setattr(NativeStep, "__call__", noted_step)
    return lengths
