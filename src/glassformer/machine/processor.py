"""This machine's processor, by what Linux says of it, and the cores of it that this process has."""

from __future__ import annotations

import os
import platform

from glassformer.machine import quota


def name() -> str:
    return _said("model name") or platform.processor() or platform.machine()


def flags() -> frozenset[str]:
    """What this processor can do, by Linux's names (avx512_vnni); empty where nobody says."""
    return frozenset(_said("flags").split())


def _said(what: str) -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith(what)), "")
    except OSError:
        return ""


def own_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_cores(own: int | None = None, groups: quota.GroupFiles = quota.HERE) -> int:
    """Cores this process may take: those it may run on (`own`, counted if None), and no more than its control groups
    pay for. A part of a core is not taken: the thread that used it up would stop until the period ends, and the others
    wait for it."""
    here, paid = own or own_cores(), quota.cores(groups)
    return here if paid is None else max(1, min(here, int(paid)))
