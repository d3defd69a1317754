"""Build of this package's C++, once for a machine: a file becomes a shared object in the cache folder, in seconds.

A kernel is a set of processor instructions for which C++ is compiled. `kernel` chooses the best one that this processor
supports; the variable GLASSFORMER_CPU chooses another, or none. A kernel that the processor lacks is refused.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from glassformer.errors import RequestError, WorkError
from glassformer.files import atomic_file, cache_folder
from glassformer.machine import processor

SWITCH = "GLASSFORMER_CPU"
"""Environment variable that names a kernel, or `none`."""
NONE = "none"
SECONDS = 120
"""Seconds within which a compiler must finish one file."""


@dataclass(frozen=True)
class Instructions:
    """Processor instructions for which C++ is compiled; called a kernel."""

    needs: frozenset[str]
    """Processor flags that the kernel needs, by Linux's names."""
    options: tuple[str, ...]
    """Compiler options, added to `OPTIONS`."""
    capability: str = ""
    """CPU capability that torch must have chosen too (ATEN_CPU_CAPABILITY lowers it); empty for any."""


KERNELS = {
    "avx512vnni": Instructions(
        frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"}),
        ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-DWITH_512=1"),
        "AVX512",
    ),
    "avxvnni": Instructions(frozenset({"avx2", "fma", "avx_vnni"}), ("-mavx2", "-mfma", "-mavxvnni", "-DWITH_VNNI=1")),
    "avx2": Instructions(frozenset({"avx2", "fma"}), ("-mavx2", "-mfma")),
    "i8mm": Instructions(frozenset({"asimddp", "i8mm"}), ("-march=armv8.2-a+dotprod+i8mm", "-DWITH_I8MM=1")),
    "dotprod": Instructions(frozenset({"asimddp"}), ("-march=armv8.2-a+dotprod",)),
}
"""Name of a kernel -> its instructions, the fastest first."""
OPTIONS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fopenmp")


def lacking(kernel: Instructions) -> str:
    """Returns the processor flags, or torch's capability, that this machine lacks for the kernel, as text; "" if it
    lacks nothing."""
    missing = sorted(kernel.needs - processor.flags())
    if not missing and kernel.capability not in ("", torch.backends.cpu.get_cpu_capability()):
        missing = [f"torch with {kernel.capability}"]
    return ", ".join(missing)


def kernel(wanted: str | None = None) -> str:
    """Returns the name of the kernel to use on this processor, or `none` for no C++.

    `wanted` is its name; for None, that in GLASSFORMER_CPU, or else the fastest that the processor supports. Raises
    RequestError for an unknown name, and for a kernel whose instructions this processor lacks."""
    wanted = os.environ.get(SWITCH, "") if wanted is None else wanted
    if not wanted:
        return next((name for name, one in KERNELS.items() if not lacking(one)), NONE)
    if wanted not in (*KERNELS, NONE):
        known = ", ".join((*KERNELS, NONE))
        raise RequestError(
            f"{SWITCH}={wanted[:40]}: use {known}", code="unknown", field=SWITCH, value=wanted[:40], expected=known
        )
    if wanted != NONE and (missing := lacking(KERNELS[wanted])):
        raise RequestError(
            f"{SWITCH}={wanted}: this processor has no {missing}; use {kernel('')} or leave the variable out",
            code="unsupported", field=SWITCH, value=wanted,
        )  # fmt: skip
    return wanted


def compiler() -> str | None:
    """Returns the path of the C++ compiler, `$CXX` or g++; None if it is not installed."""
    return shutil.which(os.environ.get("CXX") or "g++")


def build(source: Path, target: Path, options: tuple[str, ...]) -> None:
    """Compiles a C++ file into the shared object `target`. Raises WorkError without a compiler, and if it fails."""
    found = compiler()
    if found is None:
        raise WorkError("no C++ compiler was found; install g++ or set CXX", code="unsupported")
    call = [found, *options, str(source), "-o", str(target)]
    try:
        done = subprocess.run(call, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise WorkError(f"{found} does not compile {source.name}: {problem}", code="failed") from problem
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
        raise WorkError(f"{found} does not compile {source.name}: {first[:300]}", code="failed")


@cache
def shared_object(source: Path, name: str) -> ctypes.CDLL:
    """Returns the loaded library compiled from a C++ file for the kernel `name`; compiles it first if the cache folder
    lacks it, or if C++ in the same folder has changed since. Raises WorkError if it cannot be built or loaded."""
    options = (*OPTIONS, *KERNELS[name].options, "-fPIC", "-shared")
    said = "\n".join((*options, compiler() or "", sys.platform, platform.machine()))
    files = sorted({source, *source.parent.glob("*.cpp"), *source.parent.glob("*.h")})
    key = hashlib.sha256(b"".join(one.read_bytes() for one in files) + said.encode()).hexdigest()[:24]
    path = cache_folder() / "native" / f"{source.stem}-{name}-{key}.so"
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as problem:
            raise WorkError(f"{path.parent} cannot be made: {problem}", code="disk") from problem
        with atomic_file(path, private=True) as temporary:
            build(source, temporary, options)
    try:
        return ctypes.CDLL(str(path))
    except OSError as problem:
        path.unlink(missing_ok=True)
        raise WorkError(f"{path.name} cannot be loaded: {problem}", code="damaged") from problem


def if_possible(source: Path, name: str, otherwise: str) -> ctypes.CDLL | None:
    """Returns the library of `shared_object`; None, with a warning that says what happens `otherwise`, if it cannot be
    built or loaded."""
    try:
        return shared_object(source, name)
    except WorkError as problem:
        warnings.warn(f"{otherwise}: {problem}")
        return None
