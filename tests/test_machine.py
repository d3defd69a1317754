"""Defaults by device, and what is measured of the machine."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glassformer import machine
from glassformer.errors import RequestError
from glassformer.parts.precision import bf16_gain


def test_defaults_say_what_they_are_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    how = machine.settings("cpu")
    assert how.dtype == ("bfloat16" if machine.has_fast_bfloat16("cpu") else "float32")
    assert how.threads == machine.available_cores()
    assert how.dtype in how.why
    assert str(how.threads) in how.why
    assert machine.settings("cpu", "float32", 1, False).why.endswith("eager")


@pytest.mark.parametrize(("gain", "dtype"), [(2.0, "bfloat16"), (0.5, "float32")])
def test_bf16_is_the_default_where_it_pays(gain: float, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(machine, "bfloat16_gain", lambda: gain)
    assert machine.settings("cpu").dtype == dtype
    assert machine.settings("cpu", "bfloat16").dtype == "bfloat16"


class Products(TorchDispatchMode):
    """The dtype of each product, and how many threads it may use."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[torch.dtype, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen.add((args[0].dtype, torch.get_num_threads()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_measured_beside_fp32_by_one_thread(autocast: bool) -> None:
    """Several wait for each other while something else has the cores; afterwards there are as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Products() as products:
            assert 0.01 < bf16_gain.__wrapped__() < 100
        assert products.seen == {(torch.float32, 1), (torch.bfloat16, 1)}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("there", ["", "{", "[]", '{"x": 1}', "\0" * 70_000])
def test_what_is_measured_is_kept(there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    file = tmp_path / "products.json"
    file.write_text(there, encoding="utf-8")
    machine.bfloat16_gain.cache_clear()
    gain = machine.bfloat16_gain()
    assert 0.01 < gain < 100 and gain in json.loads(file.read_text()).values()
    monkeypatch.setattr(machine, "bf16_gain", lambda: 3.0)
    machine.bfloat16_gain.cache_clear()
    assert machine.bfloat16_gain() == gain
    file.write_text(file.read_text().replace(str(gain), '"fast"'), encoding="utf-8")
    machine.bfloat16_gain.cache_clear()
    assert machine.bfloat16_gain() == 3.0
    monkeypatch.undo()
    machine.bfloat16_gain.cache_clear()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"device": "tpu"}, "device='tpu' is not on this machine; here: cpu"),
        ({"dtype": "float8"}, "dtype='float8'"),
        ({"threads": 0}, "threads=0"),
    ],
)
def test_what_is_not_here_is_refused(asked: dict, says: str) -> None:
    with pytest.raises(RequestError) as refused:
        machine.settings(**asked)
    assert says in str(refused.value)


def test_compiling_without_a_compiler_is_refused_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    with pytest.raises(RequestError, match=r"C\+\+ compiler"):
        machine.settings("cpu", compile=True)
    how = machine.settings("cpu")
    assert not how.compile
    assert "needs a C++ compiler" in how.why


def test_autocast_changes_products_alone() -> None:
    x = torch.randn(4, 4)
    with machine.settings("cpu", "bfloat16").autocast():
        assert (x @ x).dtype == torch.bfloat16
    with machine.settings("cpu", "float32").autocast():
        assert (x @ x).dtype == torch.float32


@pytest.mark.slow
def test_peak_memory_sees_what_was_touched_and_nothing_of_the_parent() -> None:
    """A process of its own that touches 256 MB and frees them; this process has held far more than an idle one."""
    script = """
import torch
from glassformer.machine import peak_memory
before = peak_memory("cpu")
torch.ones(64 << 20)
print(before, peak_memory("cpu") - before)
"""
    hold = torch.ones(256 << 20)
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    before, added = map(int, said.split())
    assert 0.9 * (256 << 20) < added < 1.5 * (256 << 20)
    assert before < hold.nbytes


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, 8000),
        ({"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 5 kB\n"}, 5120),
        ({"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 5 kB\n", "/sys/fs/cgroup/memory.max": "max\n"}, 5120),
        ({"/proc/meminfo": "MemAvailable: 5 kB\n", "/sys/fs/cgroup/memory.max": "4096\n"}, 4096),
        ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": "700\n"}, 700),
        ({"/proc/meminfo": "MemAvailable:\n"}, 8000),
    ],
)
def test_free_memory_is_what_the_least_of_the_bounds_leaves(
    files: dict[str, str], found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: str, **_: str) -> io.StringIO:
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    here = machine.free_memory()
    assert here is None or 0 < here <= (machine.machine()["memory_bytes"] or here)
    monkeypatch.setattr("builtins.open", opened)
    monkeypatch.setattr(machine, "_memory", lambda: 8000)
    assert machine.free_memory() == found
    monkeypatch.setattr(machine, "_memory", lambda: None)
    assert machine.free_memory() == (None if found == 8000 else found)


def test_threads_are_as_many_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, threads in (
        ("3", 3),
        ("", machine.available_cores()),
        ("0", machine.available_cores()),
        ("2,4", 2),
    ):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert machine.settings("cpu").threads == threads
        assert machine.settings("cpu", threads=5).threads == 5
