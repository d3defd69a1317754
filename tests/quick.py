"""Choice of the cases that the default tests try; `make test-all` runs all.

There are two means. `SAMPLED` names tests whose cases are divided into parts; a run tries the part that its phase
numbers, and each commit adds one to the phase. `quickly` names the representatives of a test and leaves the other
cases, which run the same code, to `make test-all`.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

PHASES = 4
"""Phases: a multiple of the parts into which cases are divided."""
PHASE = "GLASSFORMER_PHASE"
"""The variable that repeats a run of another commit."""
EXAMPLES = {"few": 15, "whole": 40}
"""Examples of a property that names no number, in `make test` and in `make test-all`."""


@cache
def phase() -> int:
    """Commits on the first-parent line of HEAD, modulo 4, so that any four commits in a row try every case of a test
    whose cases are divided into four. A clone that lacks its history has the commit's hash in their place, and a folder
    without git has 0."""
    if given := os.environ.get(PHASE):
        return int(given) % PHASES
    try:
        if _git("rev-parse", "--is-shallow-repository") == "true":
            return int(_git("rev-parse", "HEAD")[:8], 16) % PHASES
        return int(_git("rev-list", "--count", "--first-parent", "HEAD")) % PHASES
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


SAMPLED = {
    "tests/comparison/test_compare.py": 4,
    "tests/comparison/test_statistics.py": 2,
    "tests/conversion/storage/test_attacks.py": 4,
    "tests/conversion/test_bare.py": 4,
    "tests/laboratory/test_proof.py": 4,
    "tests/conversion/test_config_walk.py": 4,
    "tests/conversion/test_exports.py": 4,
    "tests/conversion/test_refused_paths.py": 4,
    "tests/conversion/test_sentence_folders.py": 4,
    "tests/conversion/test_gguf_factors.py": 4,
    "tests/conversion/test_gguf_layouts.py": 4,
    "tests/conversion/test_gguf_metadata.py": 4,
    "tests/conversion/test_leaving.py": 4,
    "tests/conversion/test_llama_cpp.py": 4,
    "tests/conversion/test_quantize.py": 4,
    "tests/conversion/test_untrusted.py": 4,
    "tests/conversion/test_words.py": 4,
    "tests/dynamics/test_statistics.py": 4,
    "tests/generation/test_company.py": 4,
    "tests/generation/test_prompt_cache.py": 4,
    "tests/generation/test_source.py": 4,
    "tests/generation/test_speculate.py": 4,
    "tests/generation/test_text.py": 4,
    "tests/text/test_token_settings.py": 4,
    "tests/laboratory/test_advice.py": 4,
    "tests/laboratory/test_claims.py": 4,
    "tests/laboratory/test_guides.py": 4,
    "tests/laboratory/test_ladder.py": 4,
    "tests/lens/test_ablation.py": 4,
    "tests/lens/test_attribution.py": 4,
    "tests/lens/test_edits.py": 4,
    "tests/lens/test_patching.py": 4,
    "tests/machine/test_threads.py": 4,
    "tests/parallel/test_context.py": 4,
    "tests/parallel/test_experts.py": 2,
    "tests/parallel/test_filling.py": 4,
    "tests/parallel/test_mutants.py": 4,
    "tests/parallel/test_tensor.py": 4,
    "tests/parity/": 4,
    "tests/parts/test_half_precision.py": 4,
    "tests/parts/test_kernel.py": 2,
    "tests/parts/test_kernel_calls.py": 2,
    "tests/parts/test_module_template.py": 4,
    "tests/parts/test_quantized.py": 4,
    "tests/parts/test_sight.py": 2,
    "tests/planning/": 4,
    "tests/test_benchmarks.py": 4,
    "tests/test_config.py": 4,
    "tests/test_device.py": 4,
    "tests/test_docs.py": 4,
    "tests/test_edit.py": 4,
    "tests/test_expression.py": 4,
    "tests/test_generate.py": 2,
    "tests/test_generic.py": 4,
    "tests/test_names.py": 4,
    "tests/training/test_spoilt.py": 4,
    "tests/training/test_watch.py": 4,
}
"""Prefix of a test's name -> parts, a divisor of `PHASES`, into which its cases are divided; the longest prefix that
fits counts."""
DECKS: tuple[tuple[str, ...], ...] = (
    (
        "tests/planning/test_plan.py::test_plan_command_prints_the_functions_values",
        "tests/planning/test_search.py::test_the_verb_finds",
        "tests/planning/test_time.py::test_plan_command_prints_time_and_cost",
        "tests/planning/test_training_memory.py::test_plan_command_prints_training_memory",
    ),
    (
        "tests/planning/test_search.py::test_found_layouts_fit_and_the_fastest_is_first",
        "tests/planning/test_search.py::test_a_large_batch_fits_with_fewer_sequences_at_once",
        "tests/planning/test_training_memory.py::test_zero_stages_divide_their_tensors",
        "tests/planning/test_training_memory.py::test_memory_of_a_rank_adds_up",
    ),
    (
        "tests/planning/test_ranks.py::test_experts_of_several_ranks_are_planned_in_half_precision_too",
        "tests/planning/test_time.py::test_a_frozen_matrix_has_two_products_of_three",
    ),
)
"""Tests that take seconds each and the same way: they are divided as the cases of one test are."""
DECK_OF = {name: deck[0] for deck in DECKS for name in deck}


def parts_of(nodeid: str) -> int:
    """Returns the number of parts into which the cases of a test are divided; 1 if all are tried each time."""
    name, case, _ = nodeid.partition("[")
    if name in DECK_OF:
        return 4
    return max(((len(start), n) for start, n in SAMPLED.items() if case and name.startswith(start)), default=(0, 1))[1]


def left_out(items: Sequence[pytest.Item], now: int) -> list[pytest.Item]:
    """The sampled cases that are not of this phase, dealt out in an order that mixes the axes of a test."""
    decks: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        name, parts = item.nodeid.partition("[")[0], parts_of(item.nodeid)
        if name in DECK_OF or (parts > 1 and item.get_closest_marker("slow") is None):
            decks[DECK_OF.get(name, name), parts].append(item)
    away = []
    for (_, parts), cases in decks.items():
        cases.sort(key=lambda case: crc32(case.nodeid.encode()))
        away += [item for i, item in enumerate(cases) if (i - now) % min(parts, len(cases))]
    return away


def quickly(values: Iterable[Any], which: Callable[[int, Any], bool]) -> list[Any]:
    """Returns all values for `parametrize`, marked as slow if `which(i, value)` is false."""
    return [value if which(i, value) else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]
