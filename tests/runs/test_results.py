"""results.json as types: no key or number is lost in the conversion, and invalid results are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from glassformer.errors import RequestError
from glassformer.runs.files import read_result, read_results, write_result, write_results
from glassformer.runs.results import Results, RunResult
from tests.report.sample import results

POINT = [[128, 4.25]]


def finished() -> dict[str, Any]:
    """A result.json as a run leaves it."""
    return {
        "name": "gpt2@1m", "seed": 0, "parameters": 840704, "parameters_without_embeddings": 794880,
        "flops_per_token": 1.0, "config": {"d_model": 32}, "recipe": {"seed": 0, "tokens": 128},
        "train": {
            "steps": 1, "tokens": 128, "seconds": 1.0, "tokens_per_second": 128.0, "peak_memory_bytes": None,
            "learning_rate": 1e-3, "curve": POINT, "curve_seconds": [[1.0, None]], "validation_curve": [],
        },
        "validation": {"loss": 4.25, "perplexity": 70.1, "bits_per_byte": None, "tokens": 5},
        "generation": {
            "tokens_per_second": 1.0, "seconds_per_token": 1.0, "state_bytes_per_token": 1.0,
            "sample": {"prompt": "a", "text": "b", "temperature": 0.8, "top_k": 40},
        },
        "extrapolation": [{"context": 32, "loss": 4.25, "tokens": 9}, {"context": 64, "loss": None, "reason": "no"}],
        "dynamics": {}, "machine": {"processor": "x", "threads": 1}, "status": "ok", "error": None,
    }  # fmt: skip


FAILED = {
    "name": "gpt2@1m", "seed": 1, "parameters": 840704, "config": {}, "recipe": {}, "dynamics": {}, "status": "failed",
    "error": "the disk is full",
}  # fmt: skip


def text(tree: object) -> str:
    """Returns the tree as JSON, which keeps the order of keys and distinguishes integers from floats."""
    return json.dumps(tree)


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Every key, in its order, every number as it was, nothing added; of a failed run, too, which has few."""
    tree = results(3, diverge=False) | {"asked": [["gpt2@10m", 0]]}
    tree["runs"] += [finished(), FAILED]
    made = Results.of(copy.deepcopy(tree))
    assert made.to_dict() == tree
    assert [text(run) for run in made.to_dict()["runs"]] == [text(run) for run in tree["runs"]]
    write_results(made, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == tree
    assert read_results(tmp_path) == made


def test_unknown_keys_survive(tmp_path: Path) -> None:
    tree = {"schema": 1, "data": {"more": 1}, "budget": {"more": 2}, "machine": {"more": 3}, "more": {"a": [4]},
            "runs": [finished()]}  # fmt: skip
    run = tree["runs"][0]
    for part in (run, run["train"], run["validation"], run["generation"], run["extrapolation"][0], run["dynamics"]):
        part["more"] = {"x": [1, None]}
    (tmp_path / "results.json").write_text(json.dumps(tree))
    held = read_results(tmp_path)
    assert held is not None and held.to_dict() == tree


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused(version: Any, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results(1, diverge=False) | {"schema": version}))
    with pytest.raises(RequestError) as refused:
        read_results(tmp_path)
    assert (refused.value.code, refused.value.field, refused.value.value) == ("schema", "schema", version)
    (tmp_path / "result.json").write_text(json.dumps(finished() | {"schema": version}))
    assert read_result(tmp_path) is None


@pytest.mark.parametrize("words", ["", "{", "[" * 100_000, "\x00", "[]", "3", '{"mine": 1}'])
def test_invalid_results_file_is_refused(words: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(words)
    with pytest.raises(RequestError) as refused:
        read_results(tmp_path)
    assert (refused.value.code, refused.value.field) == ("damaged", "out")
    (tmp_path / "result.json").write_text(words)
    assert read_result(tmp_path) is None


def test_folder_without_results_gives_none(tmp_path: Path) -> None:
    assert read_results(tmp_path) is None and read_result(tmp_path) is None


def without(*path: str) -> dict[str, Any]:
    tree = finished()
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return tree


WHOLE = finished()
DAMAGED: list[dict[str, Any]] = [
    {"status": "ok"}, {"status": "ok", "name": "a"}, {"status": "ok", "name": "a", "seed": 0}, FAILED,
    {**WHOLE, "status": "failed"}, {**WHOLE, "status": "fine"},
    {**WHOLE, "validation": None}, {**WHOLE, "validation": {}},
    {**WHOLE, "validation": {**WHOLE["validation"], "loss": float("nan")}},
    {**WHOLE, "validation": {**WHOLE["validation"], "loss": "2"}}, {**WHOLE, "generation": None},
    {**WHOLE, "parameters": None}, {**WHOLE, "parameters": 10**30}, {**WHOLE, "extrapolation": [{"context": 3}]},
    {**WHOLE, "train": {**WHOLE["train"], "curve": [[1]]}}, {**WHOLE, "more": float("inf")},
    {**WHOLE, "train": {**WHOLE["train"], "curve": [[True, 1.0]]}}, {**WHOLE, "machine": None},
    *(without(*path.split(".")) for path in (
        "train", "train.tokens_per_second", "train.peak_memory_bytes", "generation.seconds_per_token", "dynamics",
        "error", "seed", "status", "validation", "machine", "recipe", "flops_per_token",
    )),
]  # fmt: skip


@pytest.mark.parametrize("tree", DAMAGED, ids=lambda tree: text(tree)[-60:])
def test_impossible_result_gives_none(tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(tree))
    assert read_result(tmp_path) is None


def test_the_result_of_a_run_comes_back(tmp_path: Path) -> None:
    for tree in (finished(),
                 {**finished(), "status": "diverged", "generation": None, "validation": None}):  # fmt: skip
        write_result(RunResult.of(tree), tmp_path)
        assert json.loads((tmp_path / "result.json").read_text()) == {"schema": 1, **tree}
        held = read_result(tmp_path)
        assert held is not None and held.to_dict() == tree


@pytest.mark.parametrize("status", ["diverged", "failed"])
def test_validation_of_a_run_that_did_not_end_is_refused(status: str) -> None:
    with pytest.raises(ValidationError):
        RunResult.of({**finished(), "status": status})


def test_numbers_that_are_not_finite_do_not_get_in() -> None:
    with pytest.raises(ValidationError):
        RunResult.of({**finished(), "flops_per_token": float("inf")})


def test_a_file_comes_back_as_it_was() -> None:
    tree = results(2, diverge=False) | {"asked": [["gpt2@10m", 0]]}
    assert Results.of(tree).to_dict() == tree
