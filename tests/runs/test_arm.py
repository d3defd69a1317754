"""The process of one run, and its messages when it cannot continue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from glassformer.errors import RequestError
from glassformer.naming import preset
from glassformer.runs import arm
from glassformer.runs.events import Error, decode
from glassformer.training import Recipe

REQUEST = {"name": "gpt2@1m", "recipe": {"seed": 3}}


def failing(error: Exception, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> None:
        raise error

    (place / "request.json").write_text(json.dumps(REQUEST))
    monkeypatch.setattr(arm, "measure", measure)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        MemoryError(),
    ],
)
def test_out_of_memory_is_reported(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(error, tmp_path, monkeypatch)
    assert arm.train_one(tmp_path) == 1
    said = decode(capsys.readouterr().out)
    assert said == Error(name="gpt2@1m", seed=3, error="this needs more memory than the machine has")


def test_a_wrong_request_is_an_event_and_a_defect_is_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(RequestError("no such text", code="missing", field="data"), tmp_path, monkeypatch)
    assert arm.train_one(tmp_path) == 2
    assert decode(capsys.readouterr().out) == Error(name="gpt2@1m", seed=3, error="no such text")
    failing(RuntimeError("shapes differ"), tmp_path, monkeypatch)
    with pytest.raises(RuntimeError, match="shapes differ"):
        arm.train_one(tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_the_compiler_is_imported_before_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(arm, "import_module", asked.append)
    arm.load_compiler(preset("gpt2@1m"), Recipe(tokens=1000), outside=False)
    assert not asked
    arm.load_compiler(preset("mamba@1m"), Recipe(tokens=1000), outside=False)
    arm.load_compiler(preset("gpt2@1m"), Recipe(tokens=1000, compile=True), outside=False)
    assert asked == ["torch._dynamo"] * 2
