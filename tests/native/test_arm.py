"""ARM: the machine code of a cross compiler, run by an emulator, has the bits of the plain sums and of AVX2.

It needs Debian's packages g++-aarch64-linux-gnu and qemu-user. Speed is not shown here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from glassformer.machine import native
from glassformer.parts import few_rows

from .test_few_rows import AS_AVX2, SOURCE, check_against_the_twin, runs_avx2

CROSS = "aarch64-linux-gnu-g++"
KERNELS = [name for name, one in native.KERNELS.items() if "asimddp" in one.needs]
KERNEL_FILES = sorted(few_rows.SOURCE.parent.glob("*.cpp"))
IN_FP32 = {"many_rows", "fused_loops", "fused_products", "grouped"}
"""Files without dot products of whole numbers."""
TWINS = [SOURCE, *(SOURCE.with_name(f"{name}.cpp") for name in sorted(IN_FP32))]
STEP = SOURCE.with_name("native_step.cpp")
LIBM = {"gelu"}
"""Instructions that call the C library, whose last bits may differ."""

compiles = pytest.mark.skipif(shutil.which(CROSS) is None, reason="no aarch64-linux-gnu-g++ here")
runs = pytest.mark.skipif(
    shutil.which(CROSS) is None or shutil.which("qemu-aarch64") is None,
    reason="no aarch64-linux-gnu-g++ or no qemu-aarch64 here",
)


@pytest.fixture(autouse=True)
def cross_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", CROSS)


def emulator() -> tuple[str, ...]:
    libc = subprocess.run([CROSS, "-print-file-name=libc.so.6"], capture_output=True, text=True, check=True)
    return "qemu-aarch64", "-cpu", "max", "-L", str(Path(libc.stdout.strip()).resolve().parents[1])


def options(name: str) -> tuple[str, ...]:
    return (*native.OPTIONS, *native.KERNELS[name].options)


@compiles
@pytest.mark.parametrize("source", KERNEL_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles_to_its_own_instructions(name: str, source: Path, tmp_path: Path) -> None:
    native.build(source, tmp_path / "made.s", (*options(name), "-O1", "-S"))
    told = (tmp_path / "made.s").read_text(encoding="utf-8").split()
    if source.stem not in IN_FP32:
        assert ("smmla" if name == "i8mm" else "sdot") in told and ("smmla" in told) == (name == "i8mm")


@runs
@pytest.mark.parametrize("source", TWINS, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", KERNELS)
def test_machine_code_has_the_bits_of_the_plain_sums(name: str, source: Path, tmp_path: Path) -> None:
    check_against_the_twin(tmp_path, options(name), 20, source, emulator())


@runs
@pytest.mark.slow
@pytest.mark.parametrize("source", TWINS, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", KERNELS)
def test_undefined_behaviour_is_not_found(name: str, source: Path, tmp_path: Path) -> None:
    checked = ("-fsanitize=undefined", "-fno-sanitize-recover=all", "-O1", *options(name)[1:])
    check_against_the_twin(tmp_path, checked, 60, source, emulator())


def numbers(program: Path, *runner: str) -> dict[str, list[list[float]]]:
    done = subprocess.run([*runner, program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[list[float]]] = {}
    for line in done.stdout.splitlines():
        words = line.split(" ")
        first = next(at for at, word in enumerate(words) if "0x" in word)
        found.setdefault(" ".join(words[:first]), []).append([float.fromhex(word) for word in words[first:]])
    return found


@runs
@runs_avx2
@pytest.mark.parametrize("name", KERNELS)
def test_a_step_has_the_bits_of_avx2(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.build(STEP, tmp_path / "arm", (*options(name), "-O1"))
    arm = numbers(tmp_path / "arm", *emulator())
    monkeypatch.delenv("CXX")
    native.build(STEP, tmp_path / "here", (*native.OPTIONS, *AS_AVX2, "-O1"))
    here = numbers(tmp_path / "here")
    assert arm.keys() == here.keys() and len(arm) > 15
    for kind, meant in here.items():
        assert any(any(line) for line in meant), kind
        for one, other in zip(arm[kind], meant, strict=True):
            assert one == (pytest.approx(other, rel=1e-6, abs=1e-7) if kind in LIBM else other), kind
