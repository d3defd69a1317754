"""Settings of computation on this machine: device, dtype, threads, compilation."""

from __future__ import annotations

import os
import platform
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from glassformer.errors import RequestError
from glassformer.machine import processor, threads
from glassformer.machine.device import Abilities, device_named
from glassformer.machine.memory import all_memory, keep_freed_memory
from glassformer.units import plural
from glassformer.version import __version__

DType = Literal["auto", "float32", "bfloat16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """Settings of computation: device, dtype of matmuls (by autocast; weights are fp32), number of threads,
    compilation."""

    device: str
    dtype: str
    threads: int
    compile: bool
    why: str = ""
    """Sentence for the user with the choices and their reasons, on one line."""
    fixed: bool = False
    """True if the user gave the number of threads."""

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.split(":")[0], dtype=DTYPES[self.dtype])

    def describe(self) -> dict[str, Any]:
        """Returns these settings with processor, memory and versions, the content of the field `machine` of
        results.json."""
        own = {name: value for name, value in asdict(self).items() if name not in ("why", "fixed")}
        card = {"accelerator": torch.cuda.get_device_name(self.device)} if self.device.startswith("cuda") else {}
        return {**machine(), **card, **own}


def settings(
    device: str = "auto", dtype: str = "auto", threads: int | None = None, compile: bool | None = None
) -> Settings:
    """Returns the settings of computation on a device: its defaults, except for given arguments.

    Raises RequestError for a device that this machine lacks or a dtype that the device lacks."""
    device = device_named(device)
    if dtype not in ("auto", *DTYPES):
        raise RequestError(
            f"dtype={dtype!r}: use auto, {' or '.join(DTYPES)}", code="unknown", field="dtype", value=dtype
        )
    return chosen(Abilities.of(device), dtype, threads, compile)


def chosen(here: Abilities, dtype: str = "auto", threads: int | None = None, compile: bool | None = None) -> Settings:
    """Returns the settings of computation for a device with these abilities; arguments other than "auto" and None
    override defaults. Raises RequestError."""
    fast = here.fast_bfloat16
    picked = dtype if dtype != "auto" else "bfloat16" if fast else "float32"
    if threads is not None and not 1 <= threads <= 4096:
        raise RequestError(
            f"threads={threads}: expected a number from 1 up; this process may use {here.cores} cores",
            code="range", field="threads", value=threads,
        )  # fmt: skip
    asked = threads or _asked_threads()
    count = asked or here.cores
    if compile and not here.compiler:
        raise RequestError(
            f"compile=True needs {_needs(here.device)}; leave it out to run eagerly", code="missing", field="compile"
        )
    use = here.compiler if compile is None else compile
    reasons = [
        f"{picked} matrix products" + ("" if fast or picked == "bfloat16" else " (no fast bfloat16 here)"),
        plural(count, "thread") if here.device == "cpu" else "",
        "compiled regions" if use else "eager" + ("" if here.compiler else f" (compiling needs {_needs(here.device)})"),
    ]
    why = f"on {here.device}: " + ", ".join(filter(None, reasons))
    return Settings(here.device, picked, count, use, why, fixed=bool(asked))


def _asked_threads() -> int | None:
    """Returns the number of threads in OMP_NUM_THREADS, which torch and its libraries also follow; None if it is not
    set."""
    said = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number for each level of nesting
    return int(said) if said.isdecimal() and 1 <= int(said) <= 4096 else None


def _needs(device: str) -> str:
    return "a C++ compiler (g++) and Python's headers" if device == "cpu" else "triton"


def synchronize(device: str) -> None:
    """Waits until the device has finished all its work, so that a clock read afterwards includes it."""
    if device != "cpu":
        getattr(torch, device.split(":")[0]).synchronize()


def apply(chosen: Settings) -> None:
    """Sets torch's number of threads and the allocator for this process. A number that the user gave holds for every
    step; otherwise it is the most that a step takes (`machine.threads`)."""
    torch.set_num_threads(chosen.threads)
    threads.fix(chosen.fixed or chosen.device != "cpu")
    if chosen.device == "cpu":
        keep_freed_memory()


def machine() -> dict[str, Any]:
    """Returns names of processor, platform and versions, number of cores and bytes of memory, for reports."""
    return {
        "processor": processor.name(),
        "cores": processor.available_cores(),
        "memory_bytes": all_memory(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "glassformer": __version__,
    }
