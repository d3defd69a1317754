"""Devices of this machine, and their abilities: bf16, compilation."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

import torch

from glassformer.errors import Code, RequestError
from glassformer.files import remember, remembered
from glassformer.machine import processor


@dataclass(frozen=True)
class Abilities:
    """Properties of a device that determine the default settings of computation."""

    device: str
    cores: int
    """Number of CPU cores that this process may use."""
    fast_bfloat16: bool
    compiler: bool

    @classmethod
    def of(cls, device: str) -> Abilities:
        return cls(device, processor.available_cores(), has_fast_bfloat16(device), can_compile(device))


def device_named(device: str | torch.device) -> str:
    """Returns the full name of a device, such as cuda:0; for `auto`, the accelerator or else cpu. Raises RequestError
    if this machine lacks it."""
    if not isinstance(device, str | torch.device):
        raise RequestError(code="type", field="device", value=device, expected="a device such as cpu or cuda")
    device = str(device)
    own = torch.accelerator.current_accelerator(check_available=True)
    here = ["cpu"] if own is None else ["cpu", own.type]
    if device == "auto":
        return here[-1]
    try:
        asked = torch.device(device)
    except RuntimeError:
        asked = torch.device("meta")
    most = 1 if asked.type == "cpu" else torch.accelerator.device_count()
    if asked.type not in here or (asked.index or 0) >= most:
        raise RequestError(
            f"device={device!r} is not on this machine; here: {', '.join(here)}",
            code="unsupported", field="device", value=device,
        )  # fmt: skip
    return asked.type if asked.type in ("cpu", "mps") else str(asked)


WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes in which weights can be loaded."""


def dtype_of(
    dtype: torch.dtype | str, field: str = "dtype", known: Collection[torch.dtype] | None = None
) -> torch.dtype:
    """Returns a torch dtype, given itself or by a name such as "bfloat16" or "torch.bfloat16". Raises RequestError for
    an unknown name, or one that is not among the `known`; `field` names the argument in the message.

    >>> dtype_of("bfloat16")
    torch.bfloat16
    """
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        code: Code = "unknown" if isinstance(dtype, str) else "type"
        raise RequestError(code=code, field=field, value=dtype, expected="a dtype of torch such as bfloat16")
    if known is not None and found not in known:
        names = ", ".join(str(one).removeprefix("torch.") for one in known)
        raise RequestError(code="unsupported", field=field, value=str(dtype), expected=f"one of {names}")
    return found


LEAST_GAIN = 1.1
"""Least speed of bf16 matmuls over fp32 ones at which bf16 is worth the overhead of autocast."""


def has_fast_bfloat16(device: str) -> bool:
    """Returns True if matmuls in bf16 are faster than in fp32: on CUDA from Ampere on; on a CPU with AVX512-BF16 or AMX
    if measured so."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_capability(device)[0] >= 8
    return device == "cpu" and bfloat16_pays()


def bfloat16_pays(capability: str | None = None, units: bool | None = None, gain: float | None = None) -> bool:
    """Returns True if matmuls in bf16 are faster than in fp32 on a CPU.

    capability   vector instructions by torch's name; if None, those of this processor
    units        AVX512-BF16 or AMX is present; if None, as torch reports
    gain         speed of bf16 over fp32; if None, measured"""
    if not (capability or torch.backends.cpu.get_cpu_capability()).startswith("AVX512"):
        return False
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    if not (any(check is not None and check() for check in checks) if units is None else units):
        return False
    return (bfloat16_gain() if gain is None else gain) > LEAST_GAIN


@cache
def bf16_gain(size: int = 256, rounds: int = 7) -> float:
    """Returns the speed of bf16 matmuls over fp32 ones on this processor, measured in some milliseconds. The
    instructions do not determine it: a Xeon with AVX512-BF16 and without AMX was measured at 0.5, a Zen 4 at 2.1.

    It is the best of several alternating rounds, since other work slows both dtypes; and by one thread, because several
    wait for each other if another process has the cores."""
    best = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    pairs = {dtype: torch.ones(2, size, size, dtype=dtype).unbind() for dtype in best}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.autocast("cpu", enabled=False):
            for i in range(rounds + 1):
                for dtype, (a, b) in pairs.items():
                    began = time.perf_counter()
                    a @ b
                    if i:  # the first call compiles
                        best[dtype] = min(best[dtype], time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return best[torch.float32] / best[torch.bfloat16]


@cache
def bfloat16_gain(measure: Callable[[], float] = bf16_gain) -> float:
    """Returns the speed of bf16 matmuls over fp32 ones, measured by `measure` once for a processor and kept on disk, so
    that every run on a machine has the same defaults."""
    key = f"{processor.name()}, {len(processor.flags())} flags, one thread, torch {torch.__version__}"
    gain = remembered("products.json", key)
    if not isinstance(gain, float) or not 0.01 < gain < 100:
        gain = measure()
        remember("products.json", key, gain)
    return gain


def can_compile(device: str, compiler: str | None = None) -> bool:
    """Returns True if `torch.compile` has its compiler and headers on this device; always False on MPS, because it is
    not faster. `compiler`: name of the C++ compiler, for None `$CXX` or g++."""
    if device.startswith("cuda"):
        try:
            import triton  # type: ignore[import-not-found]  # noqa: F401
        except ImportError:
            return False
        return True
    found = shutil.which(compiler or os.environ.get("CXX", "g++"))
    headers = os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h"))  # compiled loops include it
    return device == "cpu" and sys.platform != "win32" and found is not None and headers
