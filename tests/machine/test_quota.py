"""Containers: what `cpu.max` and `memory.max`, or their forerunners, say counts as this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from glassformer.machine import quota
from glassformer.machine.memory import all_memory, free_memory
from glassformer.machine.processor import available_cores

NONE = "9223372036854771712\n"


Groups = Callable[[str, dict[str, str]], quota.GroupFiles]


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    """groups(own, files) makes the files of a tree of control groups, and says which is this process's."""

    def make(own: str, files: dict[str, str]) -> quota.GroupFiles:
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "own").write_text(own)
        return quota.GroupFiles(str(tmp_path / "groups"), str(tmp_path / "own"))

    return make


@pytest.mark.parametrize(
    ("own", "files", "found"),
    [
        ("", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3.0),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 50000\n", "a/cpu.max": "300000 100000\n"}, 1.0),
        ("0::/not/mounted/here\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.5),
        ("4:cpu:/x\n0::/\n", {"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "100000"}, 1.0),
        ("0::/../../x\n", {"cpu.max": "junk"}, None),
        ("0::/\n", {"cpu.max": "100000 0\n"}, None),
    ],
)
def test_cores(own: str, files: dict[str, str], found: float | None, groups: Groups) -> None:
    here = groups(own, files)
    assert quota.cores(here) == found
    assert available_cores(8, here) == (8 if found is None else int(found))


def test_a_part_of_a_core_is_one(groups: Groups) -> None:
    here = groups("0::/\n", {"cpu.max": "20000 100000\n"})
    assert quota.cores(here) == 0.2
    assert available_cores(groups=here) == 1


@pytest.mark.parametrize(
    ("own", "files", "most", "free"),
    [
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, None, None),
        ("0::/\n", {"memory.max": "4096\n"}, 4096, 4096),
        ("0::/a\n", {"a/memory.max": "4096\n", "a/memory.current": "1000\n", "memory.max": "8000\n"}, 4096, 3096),
        (
            "0::/\n",
            {"memory.max": "4096", "memory.current": "4000",
             "memory.stat": "anon 1\ninactive_file 700\nactive_file 300\n"},
            4096,
            1096,
        ),
        ("0::/\n", {"memory.max": "100", "memory.current": "400"}, 100, 0),
        (
            "9:memory:/x\n",
            {"memory/memory.limit_in_bytes": NONE, "memory/x/memory.limit_in_bytes": "900",
             "memory/x/memory.usage_in_bytes": "500",
             "memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 60\ntotal_active_file 40\n"},
            900,
            500,
        ),
    ],
)  # fmt: skip
def test_memory(own: str, files: dict[str, str], most: int | None, free: int | None, groups: Groups) -> None:
    here = groups(own, files)
    assert (quota.memory(here), quota.free_memory(here)) == (most, free)
    assert most is None or all_memory(here) == most
    assert free is None or free_memory(groups=here) == free
