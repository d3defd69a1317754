"""Memory of this machine and of this process: free bytes, peak, and the allocator's behaviour."""

from __future__ import annotations

import ctypes
import gc
import os
import sys

import torch

from glassformer.machine import quota

LARGE_PAGE = 1 << 21
"""Bytes of a large page of x86-64, and of ARM with small pages of 4 KiB."""
IN_LARGE_PAGES = 1 << 30
"""Bytes of address space for later allocations that Linux is asked to back with large pages. Only bytes that are
written take memory."""


def keep_freed_memory() -> bool:
    """Makes glibc keep freed blocks, because a training step frees and takes the same gigabytes each time, and every
    page returned to the system is zeroed again, and asks for large pages for what is allocated next. Returns False
    without glibc."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold, huge = -1, -3, 2**31 - 1
        kept = all([libc.mallopt(m_mmap_threshold, huge), libc.mallopt(m_trim_threshold, huge)])
        if kept:
            _ask_for_large_pages(libc)
        return kept
    except (OSError, AttributeError):
        return False


def _ask_for_large_pages(libc: ctypes.CDLL) -> None:
    """Advises Linux to back the next `IN_LARGE_PAGES` of the heap with large pages: a step of a small model reads tens
    of megabytes, whose small pages are more than a processor translates without a search; a hundredth of its time."""
    madv_hugepage = 14
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.madvise.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], [ctypes.c_void_p]
    if (block := libc.malloc(IN_LARGE_PAGES)) is None:
        return
    first = -(-block // LARGE_PAGE) * LARGE_PAGE
    libc.madvise(first, (block + IN_LARGE_PAGES - first) // LARGE_PAGE * LARGE_PAGE, madv_hugepage)
    libc.free(block)  # to the end of the heap, where later blocks are taken


def all_memory(groups: quota.GroupFiles = quota.HERE) -> int | None:
    """Returns the bytes of this machine's memory, or of its control group's limit if that is less; None if unknown."""
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return quota.memory(groups)
    return min(there, quota.memory(groups) or there)


def free_memory(
    device: torch.device | str = "cpu", meminfo: str = "/proc/meminfo", groups: quota.GroupFiles = quota.HERE
) -> int | None:
    """Returns the bytes that can still be allocated on the device; None if unknown. On the CPU: before the system kills
    a process, by Linux's estimate in `meminfo`, within the limit of the control group; without the estimate all
    memory."""
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if kind == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if kind != "cpu":
        return None
    bounds = (all_memory(groups), available(meminfo), quota.free_memory(groups))
    return min((bound for bound in bounds if bound is not None), default=None)


def available(file: str) -> int | None:
    """Returns the available bytes that Linux reports in a file such as /proc/meminfo; None if the file does not say."""
    try:
        with open(file, encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def file_pages() -> int:
    """Returns the bytes of mapped files, such as libraries, that this process has touched; 0 if unknown."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssFile:"))
    except (OSError, StopIteration, ValueError):
        return 0


def peak_memory(device: str) -> int:
    """Returns the most bytes that this process has had: on the device if it has separate memory, otherwise resident
    ones; 0 if unknown."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    if device == "mps":
        return torch.mps.driver_allocated_memory()
    try:
        with open("/proc/self/status", encoding="ascii") as status:  # getrusage would include the parent's peak
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> bool:
    """Gives freed memory back to the system and resets the peak, so that `peak_memory` covers only later work. Returns
    False if the system cannot."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # resets VmHWM to the resident size
    except (OSError, AttributeError):
        return False
    return True
