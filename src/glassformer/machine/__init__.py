"""This computer: its processor, cores and memory, the defaults derived from them, and the number of threads of each
kind of work."""

from __future__ import annotations

from glassformer.machine.defaults import DTYPES, DType, Settings, apply, machine, settings, synchronize
from glassformer.machine.device import WEIGHT_DTYPES, can_compile, device_named, dtype_of, has_fast_bfloat16
from glassformer.machine.memory import all_memory, file_pages, forget_peak, free_memory, keep_freed_memory, peak_memory
from glassformer.machine.others import seconds_since_start
from glassformer.machine.processor import available_cores

__all__ = [
    "DTYPES",
    "WEIGHT_DTYPES",
    "DType",
    "Settings",
    "all_memory",
    "apply",
    "available_cores",
    "can_compile",
    "device_named",
    "dtype_of",
    "file_pages",
    "forget_peak",
    "free_memory",
    "has_fast_bfloat16",
    "keep_freed_memory",
    "machine",
    "peak_memory",
    "seconds_since_start",
    "settings",
    "synchronize",
]
