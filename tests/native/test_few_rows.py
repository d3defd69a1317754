"""Products of few rows: the machine code is the same sums written plainly, and a processor gets what it has."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glassformer.machine import native, processor
from glassformer.parts import few_rows
from glassformer.parts.few_rows import DEFINITIONS, GROUP, LEAST, MOST, ROWS, product
from tests.refused import refused

SOURCE = Path(__file__).with_name("few_rows.cpp")
AS_AVX2 = native.KERNELS["avx2"].options
AS_VNNI = (*AS_AVX2, "-DWITH_VNNI=1", "-DIMAGINED")
AS_512 = (*AS_AVX2, "-DWITH_512=1", "-DIMAGINED")
"""Instructions that few processors have are functions (`imagined.h`)."""
SANITIZED = (
    "-O1",
    "-g",
    "-std=c++17",
    "-ffp-contract=off",
    "-fopenmp",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)
runs_avx2 = pytest.mark.skipif(
    bool(native.lacking(native.KERNELS["avx2"])) or native.compiler() is None, reason="no AVX2, or no compiler here"
)
has_kernel = pytest.mark.skipif(not few_rows.kernel(), reason="no kernel for this processor, or no compiler here")


def check_against_the_twin(
    folder: Path, options: tuple[str, ...], rounds: int, source: Path = SOURCE, runner: tuple[str, ...] = ()
) -> None:
    native.build(source, folder / "twin", (*options, f"-DROUNDS={rounds}"))
    done = subprocess.run([*runner, folder / "twin"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("0 of "), done.stdout + done.stderr[-2000:]


@runs_avx2
@pytest.mark.parametrize("kernel", [AS_AVX2, AS_512], ids=["avx2", "avx512vnni"])
def test_the_machine_code_has_the_bits_of_the_plain_sums(kernel: tuple[str, ...], tmp_path: Path) -> None:
    check_against_the_twin(tmp_path, (*native.OPTIONS, *kernel), 60)


@pytest.mark.skipif(native.compiler() is None or platform.machine() != "x86_64", reason="no compiler for x86-64 here")
@pytest.mark.parametrize("source", sorted(few_rows.SOURCE.parent.glob("*.cpp")), ids=lambda path: path.stem)
@pytest.mark.parametrize("name", [name for name, one in native.KERNELS.items() if "avx2" in one.needs])
def test_every_kernel_compiles(name: str, source: Path, tmp_path: Path) -> None:
    options = (*native.OPTIONS, *native.KERNELS[name].options, "-O0", "-fsyntax-only")
    native.build(source, tmp_path / "few", options)


@runs_avx2
@pytest.mark.slow
@pytest.mark.parametrize("kernel", [AS_AVX2, AS_VNNI, AS_512], ids=["avx2", "avxvnni", "avx512vnni"])
def test_sanitizers_find_nothing(kernel: tuple[str, ...], tmp_path: Path) -> None:
    check_against_the_twin(tmp_path, (*SANITIZED, *kernel), 400)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["avxvnni", "avx512vnni"])
def test_machine_code_of_a_better_processor_has_the_same_bits(name: str, tmp_path: Path) -> None:
    if (missing := native.lacking(native.KERNELS[name])) or native.compiler() is None:
        pytest.skip(f"no {missing or 'compiler'} here")
    check_against_the_twin(tmp_path, (*native.OPTIONS, *native.KERNELS[name].options), 400)


# Against the definitions


def matrix(bits: int, o: int, groups: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    if bits == 8:
        q = torch.randint(-127, 128, (o * ROWS, groups * GROUP), generator=draw, dtype=torch.int8)
        return few_rows.blocks(q), (torch.rand(o * ROWS, generator=draw) / 100).bfloat16()
    q = torch.randint(16, (o * ROWS, groups * GROUP), generator=draw, dtype=torch.int32)
    return few_rows.blocks(q), torch.randn(o, groups, ROWS, 2, generator=draw).bfloat16() / 10


def drawn(n: int, groups: int, seed: int) -> Tensor:
    return torch.randn(n, groups * GROUP, generator=torch.Generator().manual_seed(seed)).bfloat16()


@has_kernel
@pytest.mark.parametrize("bits", [4, 8])
@settings(max_examples=25, deadline=None)
@given(n=st.integers(0, 20), o=st.integers(1, 9), groups=st.integers(1, 9), seed=st.integers(0, 1000))
def test_products_are_their_definitions(bits: int, n: int, o: int, groups: int, seed: int) -> None:
    """Sums of fp32 in another order: a rounding to bf16, and 2^-20 of the sizes that are added up."""
    packed, scales = matrix(bits, o, groups, seed)
    x = drawn(n, groups, seed + 1)
    made, meant = product(x, packed, scales).double(), DEFINITIONS[bits](x, packed, scales).double()
    size = DEFINITIONS[bits](x.abs(), *_sizes(packed, scales)).double()
    assert made.shape == (n, o * ROWS)
    assert ((made - meant).abs() <= 2**-7 * meant.abs() + 2**-20 * size).all()


def _sizes(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix whose products bound what the sums of another one pass through."""
    if packed.dtype == torch.int8:
        return packed.abs(), scales
    return torch.full_like(packed, 255), scales.abs()


@has_kernel
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_in_any_company(bits: int) -> None:
    packed, scales = matrix(bits, 9, 5, 0)
    x = drawn(250, 5, 1)
    together = product(x, packed, scales)
    for some in (slice(0, 1), slice(7, 12), slice(60, 70), slice(149, 150), slice(180, 200), slice(249, 250)):
        assert torch.equal(product(x[some], packed, scales), together[some])
    torch.set_num_threads(2)
    try:
        assert torch.equal(product(x, packed, scales), together)
    finally:
        torch.set_num_threads(1)


@has_kernel
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_nan_stays_in_its_row(bits: int, odd: float) -> None:
    packed, scales = matrix(bits, 5, 2, 0)
    x = drawn(6, 2, 1)
    before = product(x, packed, scales)
    x[3, 40] = odd
    y = product(x, packed, scales)
    assert y[3].isnan().all() and torch.equal(y[[0, 1, 2, 4, 5]], before[[0, 1, 2, 4, 5]])


@has_kernel
@pytest.mark.parametrize("bits", [4, 8])
def test_values_too_small_to_be_rounded_are_zeros(bits: int) -> None:
    packed, scales = matrix(bits, 5, 2, 0)
    x = drawn(2, 2, 1) * LEAST / MOST / 100
    assert (product(x, packed, scales).float().abs() <= 100 * LEAST).all()


def test_codes_equal_the_packed_values() -> None:
    q = torch.randint(16, (3 * ROWS, 3 * GROUP), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    assert torch.equal(few_rows.codes(few_rows.blocks(q), torch.int32) + 8, q)
    q = (q - 8).to(torch.int8) * 15
    assert torch.equal(few_rows.codes(few_rows.blocks(q), torch.int8), q)


@has_kernel
def test_a_row_of_ones_adds_up_the_matrix() -> None:
    """Against F.linear on the numbers themselves."""
    packed, scales = matrix(8, 70, 3, 4)
    x = torch.ones(1, 3 * GROUP).bfloat16()
    meant = F.linear(x.double(), few_rows.codes(packed, torch.float64) * scales.double()[:, None])
    torch.testing.assert_close(product(x, packed, scales).double(), meant, rtol=2**-8, atol=1e-3)


# Which processor gets what

HAVE = {
    "avx512vnni": {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"},
    "avxvnni": {"avx2", "fma", "avx_vnni"},
    "avx2": {"avx2", "fma"},
    "i8mm": {"asimd", "asimddp", "i8mm"},
    "dotprod": {"asimd", "asimddp"},
    "none": {"sse4_2", "asimd"},
}


def play(monkeypatch: pytest.MonkeyPatch, flags: set[str], capability: str = "AVX512") -> None:
    monkeypatch.setattr(processor, "flags", lambda: frozenset(flags))
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)


@pytest.mark.parametrize("name", HAVE)
def test_a_processor_gets_the_best_that_it_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.SWITCH, raising=False)
    play(monkeypatch, HAVE[name])
    assert native.kernel() == name


def test_torch_that_plays_a_lesser_processor_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, HAVE["avx512vnni"], "AVX2")
    assert native.kernel("") == "avx2"


@pytest.mark.parametrize("name", HAVE)
@pytest.mark.parametrize("wanted", [*native.KERNELS, "none"])
def test_a_kernel_that_is_asked_for_is_taken_or_refused(
    name: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, HAVE[name])
    monkeypatch.setenv(native.SWITCH, wanted)
    if HAVE[name] >= HAVE[wanted] or wanted == "none":
        assert native.kernel() == wanted
    else:
        with refused(code="unsupported", field=native.SWITCH):
            native.kernel()


def test_an_unknown_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "avx9")
    with refused(code="unknown", field=native.SWITCH):
        native.kernel()


@pytest.mark.parametrize("compiler", ["", "#!/bin/sh\nexit 1\n"], ids=["none", "one that fails"])
def test_without_a_compiler_torch_multiplies(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, HAVE["avx2"])
    monkeypatch.delenv(native.SWITCH, raising=False)
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    if compiler:
        (tmp_path / "g++").write_text(compiler)
        (tmp_path / "g++").chmod(0o755)
    for cached in (few_rows.kernel, few_rows._calls, native.shared_object):
        monkeypatch.setattr(_home(cached), cached.__name__, cached.__wrapped__)
    with pytest.warns(UserWarning):
        assert few_rows.kernel() == ""
    assert not list(tmp_path.rglob("*.so"))


def test_a_cache_folder_that_cannot_be_made_leaves_the_products_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, HAVE["avx2"])
    monkeypatch.delenv(native.SWITCH, raising=False)
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    for cached in (few_rows.kernel, few_rows._calls, native.shared_object):
        monkeypatch.setattr(_home(cached), cached.__name__, cached.__wrapped__)
    with pytest.warns(UserWarning):
        assert few_rows.kernel() == ""


def _home(function: Any) -> Any:
    return native if function.__module__ == native.__name__ else few_rows


@runs_avx2
def test_a_wrong_product_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "avx2")
    monkeypatch.setattr(few_rows, "_called", lambda call, x, packed, scales: 2 * DEFINITIONS[
        8 if packed.dtype == torch.int8 else 4
    ](x, packed, scales))  # fmt: skip
    with pytest.warns(UserWarning):
        assert few_rows.kernel.__wrapped__() == ""
