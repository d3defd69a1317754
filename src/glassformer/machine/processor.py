"""This machine's processor, as Linux describes it, and the number of cores that this process has."""

from __future__ import annotations

import os
import platform

from glassformer.machine import quota


def name() -> str:
    return _said("model name") or platform.processor() or platform.machine()


def flags() -> frozenset[str]:
    """Returns the processor's features by Linux's names (avx512_vnni, asimddp); empty if unknown."""
    return frozenset((_said("flags") or _said("Features")).split())


def _said(what: str) -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith(what)), "")
    except OSError:
        return ""


def own_cores() -> int:
    """Returns the number of cores that this process may run on by its affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_cores(own: int | None = None, groups: quota.GroupFiles = quota.HERE) -> int:
    """Returns the number of cores that this process may use: those it may run on (`own`, by its affinity for None),
    limited by the quota of its control groups, rounded down: a thread that used up a part of a core would stop until
    the period ends, and the others would wait for it."""
    here, paid = own or own_cores(), quota.cores(groups)
    return here if paid is None else max(1, min(here, int(paid)))
