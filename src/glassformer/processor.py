"""Which processor this is, by what Linux says of it."""

from __future__ import annotations

import platform


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
