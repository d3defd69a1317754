"""What this machine is, and the defaults that follow: device, dtype, threads, compilation."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import shutil
import sys
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal

import torch

from glassformer import processor, quota
from glassformer import threads as pacing
from glassformer.errors import RequestError
from glassformer.folders import remember, remembered
from glassformer.parts.precision import bf16_gain
from glassformer.version import __version__

DType = Literal["auto", "float32", "bfloat16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """How to compute. Weights are fp32; `dtype` is what matrix products run in, by autocast."""

    device: str
    dtype: str
    threads: int
    compile: bool
    why: str = ""
    """One line on what was chosen and why."""
    fixed: bool = False
    """Whether this number of threads was asked for."""

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.split(":")[0], dtype=DTYPES[self.dtype])

    def describe(self) -> dict[str, Any]:
        """For the field `machine` of results.json."""
        own = {name: value for name, value in asdict(self).items() if name not in ("why", "fixed")}
        card = {"accelerator": torch.cuda.get_device_name(self.device)} if self.device.startswith("cuda") else {}
        return {**machine(), **card, **own}


def settings(
    device: str = "auto", dtype: str = "auto", threads: int | None = None, compile: bool | None = None
) -> Settings:
    """Sane defaults by device, each of which can be overruled.

    Raises RequestError for a device that is not here or a dtype it does not have."""
    device = device_named(device)
    if dtype not in ("auto", *DTYPES):
        raise RequestError(f"dtype={dtype!r}: use auto, {' or '.join(DTYPES)}")
    fast = has_fast_bfloat16(device)
    chosen = dtype if dtype != "auto" else "bfloat16" if fast else "float32"
    cores = available_cores()
    asked = threads or _asked_threads() or cores
    if threads is not None and not 1 <= threads <= 4096:
        raise RequestError(f"threads={threads}: a number from 1 up is right; this process may use {cores} cores")
    compiler = can_compile(device)
    if compile and not compiler:
        raise RequestError(f"compile=True needs {_needs(device)}; leave it out to run eagerly")
    use = compiler if compile is None else compile
    reasons = [
        f"{chosen} matrix products" + ("" if fast or chosen == "bfloat16" else " (no fast bfloat16 here)"),
        f"{asked} thread{'s' * (asked != 1)}" if device == "cpu" else "",
        "compiled regions" if use else "eager" + ("" if compiler else f" (compiling needs {_needs(device)})"),
    ]
    why = f"on {device}: " + ", ".join(filter(None, reasons))
    return Settings(device, chosen, asked, use, why, fixed=bool(threads or _asked_threads()))


def _asked_threads() -> int | None:
    """What OMP_NUM_THREADS says, which torch and its libraries follow too."""
    said = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number for each level of nesting
    return int(said) if said.isdecimal() and 1 <= int(said) <= 4096 else None


def synchronize(device: str) -> None:
    """Waits until the device has done what was asked of it, before a clock is read."""
    if device != "cpu":
        getattr(torch, device.split(":")[0]).synchronize()


def apply(chosen: Settings) -> None:
    """Sets torch's threads and the allocator for this process. A number that was asked for is that of every step; else
    it is the most that one takes (`threads`)."""
    torch.set_num_threads(chosen.threads)
    pacing.fix(chosen.fixed or chosen.device != "cpu")
    if chosen.device == "cpu":
        keep_freed_memory()


def device_named(device: str) -> str:
    """The device of that name, of `auto` the best one here. Raises RequestError where it is not on this machine."""
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
        raise RequestError(f"device={device!r} is not on this machine; here: {', '.join(here)}")
    return asked.type if asked.type in ("cpu", "mps") else str(asked)


def has_fast_bfloat16(device: str) -> bool:
    """Whether products in bf16 pay: on Ampere or later on CUDA; on a CPU that has AVX512-BF16 or AMX, where they are
    measured to be faster than in fp32."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_capability(device)[0] >= 8
    if device == "cpu":
        cpu = torch.backends.cpu.get_cpu_capability()
        checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
        has = cpu.startswith("AVX512") and any(check is not None and check() for check in checks)
        return has and bfloat16_gain() > LEAST_GAIN
    return False


LEAST_GAIN = 1.1
"""What autocast's own work costs is paid from here on."""


@cache
def bfloat16_gain() -> float:
    """`bf16_gain`, measured once for a processor and kept on disk: every run on one machine has the same defaults."""
    key = f"{processor.name()}, {len(processor.flags())} flags, one thread, torch {torch.__version__}"
    gain = remembered("products.json", key)
    if not isinstance(gain, float) or not 0.01 < gain < 100:
        gain = bf16_gain()
        remember("products.json", key, gain)
    return gain


def can_compile(device: str) -> bool:
    """Whether `torch.compile` has what it needs; on MPS it does not pay yet."""
    if device.startswith("cuda"):
        try:
            import triton  # type: ignore[import-not-found]  # noqa: F401
        except ImportError:
            return False
        return True
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    headers = os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h"))  # compiled loops include it
    return device == "cpu" and sys.platform != "win32" and compiler is not None and headers


def _needs(device: str) -> str:
    return "a C++ compiler (g++) and Python's headers" if device == "cpu" else "triton"


def available_cores() -> int:
    """Cores this process may take: those it may run on, and no more than its control groups pay for. A part of a core
    is not taken: the thread that used it up would stop until the period ends, and the others wait for it."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    paid = quota.cores()
    return here if paid is None else max(1, min(here, int(paid)))


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed blocks: a training step frees and takes the same gigabytes each time, and every
    page handed back to the system is zeroed again on its return. False where there is no glibc."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold, huge = -1, -3, 2**31 - 1
        return all([libc.mallopt(m_mmap_threshold, huge), libc.mallopt(m_trim_threshold, huge)])
    except (OSError, AttributeError):
        return False


def machine() -> dict[str, Any]:
    """Processor, memory and versions, for reports."""
    return {
        "processor": processor.name(),
        "cores": available_cores(),
        "memory_bytes": _memory(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "glassformer": __version__,
    }


def _memory() -> int | None:
    """Bytes of this machine, or those that the control group may hold."""
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return quota.memory()
    return min(there, quota.memory() or there)


def free_memory(device: torch.device | str = "cpu") -> int | None:
    """Bytes that can still be taken on the device. On the CPU before the system ends a process: what Linux says is
    available, within the limit of the control group; elsewhere all there are. None where nobody says."""
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if kind == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if kind != "cpu":
        return None
    found = [_memory()]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    found.append(quota.free_memory())
    return min((number for number in found if number is not None), default=None)


def peak_memory(device: str) -> int:
    """The most bytes this process has held: on the device if it has memory of its own, else resident."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    if device == "mps":
        return torch.mps.driver_allocated_memory()
    try:
        with open("/proc/self/status", encoding="ascii") as status:  # getrusage would count what the parent held
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> bool:
    """Gives freed memory back, so that `peak_memory` is next that of what follows; False where it cannot be."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # VmHWM becomes what is resident now
    except (OSError, AttributeError):
        return False
    return True
