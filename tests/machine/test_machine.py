"""Defaults by device, and what is measured of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glassformer import machine
from glassformer.errors import Code
from glassformer.machine.defaults import chosen
from glassformer.machine.device import Abilities, bf16_gain, bfloat16_gain, bfloat16_pays
from glassformer.machine.others import seconds_since_start
from glassformer.machine.quota import GroupFiles
from tests.refused import refused


def test_defaults_have_values_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    how = machine.settings("cpu")
    assert how.dtype == ("bfloat16" if machine.has_fast_bfloat16("cpu") else "float32")
    assert how.threads == machine.available_cores()
    assert how.dtype in how.why
    assert str(how.threads) in how.why
    assert machine.settings("cpu", "float32", 1, False).why.endswith("eager")


@pytest.mark.parametrize(
    ("capability", "units", "gain", "pays"),
    [
        ("AVX512", True, 2.0, True),
        ("AVX512", True, 0.5, False),
        ("AVX512", False, 2.0, False),
        ("AVX2", True, 2.0, False),
    ],
)
def test_bf16_is_the_default_if_it_is_faster(capability: str, units: bool, gain: float, pays: bool) -> None:
    assert bfloat16_pays(capability, units, gain) == pays
    here = Abilities("cpu", cores=2, fast_bfloat16=pays, compiler=False)
    assert chosen(here).dtype == ("bfloat16" if pays else "float32")
    assert chosen(here, "bfloat16").dtype == "bfloat16"


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
def test_bf16_is_compared_with_fp32_by_one_thread(autocast: bool) -> None:
    """Threads wait for each other while another process has the cores; their number is restored afterwards."""
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
def test_measured_gain_is_cached(there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    file = tmp_path / "products.json"
    file.write_text(there, encoding="utf-8")
    gain = bfloat16_gain.__wrapped__()
    assert 0.01 < gain < 100 and gain in json.loads(file.read_text()).values()
    assert bfloat16_gain.__wrapped__(lambda: 3.0) == gain
    file.write_text(file.read_text().replace(str(gain), '"fast"'), encoding="utf-8")
    assert bfloat16_gain.__wrapped__(lambda: 3.0) == 3.0


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [("device", "tpu", "unsupported"), ("dtype", "float8", "unknown"), ("threads", 0, "range")],
)
def test_missing_device_is_refused(field: str, value: object, code: Code) -> None:
    with refused(code=code, field=field) as caught:
        machine.settings(**{field: value})
    assert caught.value.value == value


def test_compiling_without_a_compiler_is_refused_or_left_out() -> None:
    assert not machine.can_compile("cpu", compiler="no-such-compiler")
    here = Abilities("cpu", cores=2, fast_bfloat16=False, compiler=False)
    with refused(code="missing", field="compile"):
        chosen(here, compile=True)
    how = chosen(here)
    assert not how.compile
    assert "needs a C++ compiler" in how.why


def test_autocast_changes_only_products() -> None:
    x = torch.randn(4, 4)
    with machine.settings("cpu", "bfloat16").autocast():
        assert (x @ x).dtype == torch.bfloat16
    with machine.settings("cpu", "float32").autocast():
        assert (x @ x).dtype == torch.float32


@pytest.mark.slow
def test_peak_memory_counts_touched_bytes_without_the_parents() -> None:
    """A separate process touches 256 MB and frees them; this process has held far more than an idle one."""
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
    ("meminfo", "groups", "found"),
    [
        (None, {}, None),
        ("MemTotal: 9 kB\nMemAvailable: 5 kB\n", {}, 5120),
        ("MemTotal: 9 kB\nMemAvailable: 5 kB\n", {"memory.max": "max\n"}, 5120),
        ("MemAvailable: 5 kB\n", {"memory.max": "4096\n"}, 4096),
        (None, {"memory/memory.limit_in_bytes": "700\n"}, 700),
        ("MemAvailable:\n", {}, None),
        ("MemAvailable: 9999999999999 kB\n", {}, None),
    ],
)
def test_free_memory_is_the_smallest_bound(
    meminfo: str | None, groups: dict[str, str], found: int | None, tmp_path: Path
) -> None:
    """Without `found`, only the memory of the machine is a bound."""
    files = {"meminfo": meminfo, **{f"groups/{name}": text for name, text in groups.items()}}
    for name, text in files.items():
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    limits, whole = GroupFiles(str(tmp_path / "groups"), str(tmp_path / "own")), machine.machine()["memory_bytes"]
    free = machine.free_memory("cpu", str(tmp_path / "meminfo"), limits)
    assert free is not None
    assert free == found if found is not None else free >= whole
    here = machine.free_memory()
    assert here is None or 0 < here <= whole


def test_number_of_threads_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, threads in (
        ("3", 3),
        ("", machine.available_cores()),
        ("0", machine.available_cores()),
        ("2,4", 2),
    ):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert machine.settings("cpu").threads == threads
        assert machine.settings("cpu", threads=5).threads == 5


def test_the_age_of_a_process_is_that_of_the_system(tmp_path: Path):
    """Field 22 of stat is the start in ticks since the boot (proc(5)); a name may hold spaces and brackets."""
    (tmp_path / "self").mkdir()
    started = 100 * os.sysconf("SC_CLK_TCK")
    (tmp_path / "self" / "stat").write_text(f"7 (a) b) S {' '.join(['0'] * 18)} {started} 0")
    (tmp_path / "uptime").write_text("112.50 200.00")
    assert seconds_since_start(str(tmp_path)) == pytest.approx(12.5)
    assert seconds_since_start(str(tmp_path / "nowhere")) is None
    age = machine.seconds_since_start()
    assert age is None or 0 < age < 1e6
