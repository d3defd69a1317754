"""C++ of this package, built once for a machine: a file becomes a shared object in the cache folder, in seconds.

A kernel is a set of instructions that some C++ is compiled for. `kernel` chooses the best that this processor has;
GLASSFORMER_CPU chooses another, or none. A processor never gets instructions that it lacks.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from glassformer.errors import RequestError, WorkError
from glassformer.files import atomic_file, cache_folder
from glassformer.machine import processor

SWITCH = "GLASSFORMER_CPU"
"""Variable of the environment that names a kernel, or `none`."""
NONE = "none"
SECONDS = 120
"""Time that a compiler gets for one file."""


@dataclass(frozen=True)
class Instructions:
    """Instructions that some C++ is compiled for."""

    needs: frozenset[str]
    """Flags of the processor, by Linux's names."""
    options: tuple[str, ...] = ()
    """Options of the compiler, added to `OPTIONS`; empty if only a decoding step is compiled with the kernel."""
    capability: str = ""
    """Level of instructions that torch must have chosen too (ATEN_CPU_CAPABILITY lowers it); empty for any."""


KERNELS = {
    "avx512vnni": Instructions(frozenset({"avx512f", "avx512bw", "avx512vbmi", "avx512_vnni"}), capability="AVX512"),
    "avxvnni": Instructions(frozenset({"avx2", "fma", "avx_vnni"}), ("-mavx2", "-mfma", "-mavxvnni", "-DWITH_VNNI=1")),
    "avx2": Instructions(frozenset({"avx2", "fma"}), ("-mavx2", "-mfma")),
}
"""Kernels by name, the best first."""
OPTIONS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fopenmp")


def lacking(kernel: Instructions) -> str:
    """Returns what this processor lacks for the kernel, or an empty text."""
    missing = sorted(kernel.needs - processor.flags())
    if not missing and kernel.capability not in ("", torch.backends.cpu.get_cpu_capability()):
        missing = [f"torch with {kernel.capability}"]
    return ", ".join(missing)


def kernel(wanted: str | None = None) -> str:
    """Returns the name of the kernel that serves here, or `none`.

    `wanted`: GLASSFORMER_CPU if None. Raises RequestError for a name that is unknown, and for a kernel whose
    instructions this processor lacks."""
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
    """Returns the path of the C++ compiler, `$CXX` or g++, or None."""
    return shutil.which(os.environ.get("CXX") or "g++")


def build(source: Path, target: Path, options: tuple[str, ...]) -> None:
    """Compiles one file of C++ into `target`. Raises WorkError without a compiler, and for C++ that it refuses."""
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
def shared_object(source: Path, name: str, *included: Path) -> ctypes.CDLL:
    """Returns the shared object of a C++ file for the kernel of this name, built if it is not in the cache folder yet.

    included   other files that the C++ includes

    Raises WorkError if it can be neither built nor loaded."""
    options = (*OPTIONS, *KERNELS[name].options, "-fPIC", "-shared")
    said = "\n".join((*options, compiler() or "", sys.platform, platform.machine()))
    key = hashlib.sha256(b"".join(one.read_bytes() for one in (source, *included)) + said.encode()).hexdigest()[:24]
    path = cache_folder() / "native" / f"{source.stem}-{name}-{key}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_file(path, private=True) as temporary:
            build(source, temporary, options)
    try:
        return ctypes.CDLL(str(path))
    except OSError as problem:
        path.unlink(missing_ok=True)
        raise WorkError(f"{path.name} cannot be loaded: {problem}", code="damaged") from problem
