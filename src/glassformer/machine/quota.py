"""Limits of control groups, and so of containers, on a Linux machine: cores and memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class GroupFiles(NamedTuple):
    """Places of the files in which Linux describes control groups; `root` is a folder."""

    root: str = "/sys/fs/cgroup"
    own: str = "/proc/self/cgroup"
    """File that names the control groups of this process."""


HERE = GroupFiles()


def cores(files: GroupFiles = HERE) -> float | None:
    """Returns the number of cores, a fraction, that all control groups above this process allow: `cpu.max` of version
    2, `cpu.cfs_*` of version 1. None without a limit."""
    found = []
    for folder in _groups("cpu", files):
        quota, period = _two(_said(folder, "cpu.max"))
        if quota is None or period is None:
            quota, period = _number(_said(folder, "cpu.cfs_quota_us")), _number(_said(folder, "cpu.cfs_period_us"))
        if quota and period:
            found.append(quota / period)
    return min(found, default=None)


def memory(files: GroupFiles = HERE) -> int | None:
    """Returns the most bytes that the control groups of this process may hold; None without a limit."""
    return min((limit for _, limit in _limits(files)), default=None)


def free_memory(files: GroupFiles = HERE) -> int | None:
    """Returns the bytes that this process can still allocate within its control groups: the limit minus memory in use,
    cached files excepted; None without a limit."""
    found = []
    for folder, limit in _limits(files):
        held = _number(_said(folder, "memory.current")) or _number(_said(folder, "memory.usage_in_bytes")) or 0
        rows = dict(line.split()[:2] for line in _said(folder, "memory.stat").splitlines() if len(line.split()) > 1)
        names = ("total_inactive_file", "total_active_file") if "total_inactive_file" in rows else (
            "inactive_file", "active_file")  # fmt: skip
        cached = sum(_number(rows.get(name, "")) or 0 for name in names)
        found.append(max(0, limit - max(0, held - cached)))
    return min(found, default=None)


def _limits(files: GroupFiles) -> Iterator[tuple[str, int]]:
    for folder in _groups("memory", files):
        limit = _number(_said(folder, "memory.max")) or _number(_said(folder, "memory.limit_in_bytes"))
        if limit is not None:
            yield folder, limit


def _groups(controller: str, files: GroupFiles) -> Iterator[str]:
    """Yields the folders of this process's control groups, from its own up to the mounted root: first of version 2,
    then of version 1 for the `controller`. In a container the process's group may be that root."""
    rows = [line.split(":", 2) for line in _said("", files.own).splitlines() if line.count(":") > 1]
    own = {name: path for _, names, path in rows for name in names.split(",")}
    for root, path in ((files.root, own.get("", "/")), (f"{files.root}/{controller}", own.get(controller, "/"))):
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts), -1, -1):
            yield "/".join([root, *parts[:depth]])


def _said(folder: str, file: str) -> str:
    try:
        with open(f"{folder}/{file}" if folder else file, encoding="utf-8") as text:
            return text.read()
    except (OSError, ValueError):
        return ""


def _two(said: str) -> tuple[int | None, int | None]:
    words = said.split()
    return (_number(words[0]), _number(words[1])) if len(words) == 2 else (None, None)


def _number(said: str) -> int | None:
    """Returns the integer in a text; None for "max", -1, and an empty text."""
    return int(said) if said.strip().isdecimal() else None
