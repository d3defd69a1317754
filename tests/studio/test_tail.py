"""A file that grows is read like a whole one."""

from __future__ import annotations

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from glassformer.studio import tail
from glassformer.studio.tail import Tail


def number(line: bytes) -> int | None:
    return int(line) if line.strip().isdigit() else None


def test_rows_are_those_of_the_whole_file_at_every_length(tmp_path: Path) -> None:
    content = b"1\n22\nnothing\n333\n\n4444\n55"
    path = tmp_path / "rows"
    growing = Tail(path, number)
    assert growing.rows() == []
    for end in range(len(content) + 1):
        with path.open("r+b" if end else "wb") as file:
            file.write(content[:end])
        complete = content[:end].rpartition(b"\n")[0].split(b"\n")
        assert growing.rows() == [int(line) for line in complete if line.isdigit()]


def test_file_that_was_cut_replaced_or_removed_is_read_again(tmp_path: Path) -> None:
    path, other = tmp_path / "rows", tmp_path / "other"
    path.write_bytes(b"1\n2\n3\n")
    growing = Tail(path, number)
    assert growing.rows() == [1, 2, 3] and growing.last == 3
    path.write_bytes(b"1\n")
    assert growing.rows() == [1]
    other.write_bytes(b"7\n8\n9\n10\n")
    os.replace(other, path)
    assert growing.rows() == [7, 8, 9, 10]
    path.unlink()
    assert growing.rows() == [] and growing.last is None


@pytest.mark.parametrize("regrown", [b"1\n22\n333\n5\n", b"1\n22\n333\n5", b"1\n22\n3333333\n4\n"])
def test_file_that_was_cut_and_has_grown_since_is_read_again(tmp_path: Path, regrown: bytes) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"1\n22\n4\n")
    growing = Tail(path, number)
    assert growing.rows() == [1, 22, 4]
    path.write_bytes(regrown)  # in place
    assert growing.rows() == [int(line) for line in regrown.rpartition(b"\n")[0].split(b"\n")]


def test_threads_read_each_row_once_and_no_list_changes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "MOST_ROWS", 32)
    path = tmp_path / "rows"
    path.write_bytes(b"".join(b"%d\n" % i for i in range(20)))

    def slow(line: bytes) -> int | None:
        time.sleep(0.002)
        return number(line)

    growing = Tail(path, slow)
    with ThreadPoolExecutor(4) as pool:
        found = [one.result() for one in [pool.submit(growing.rows) for _ in range(4)]]
    assert found == [list(range(20))] * 4
    with path.open("ab") as file:
        file.write(b"".join(b"%d\n" % i for i in range(20, 40)))
    assert len(growing.rows()) < 32 and found == [list(range(20))] * 4


def test_long_file_keeps_rows_of_equal_distance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "MOST_ROWS", 16)
    path = tmp_path / "rows"
    growing = Tail(path, number)
    with path.open("wb", buffering=0) as file:
        for i in range(1000):
            file.write(b"%d\n" % i)
            rows = growing.rows()
            assert len(rows) <= 16 and growing.last == i
            assert len({b - a for a, b in itertools.pairwise(rows)}) <= 1


def test_line_that_is_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "LINE", 8)
    path = tmp_path / "rows"
    path.write_bytes(b"1\n" + b"x" * 20 + b"\n2\n")
    growing = Tail(path, number)
    for _ in range(4):
        growing.rows()
    assert growing.rows() == [1, 2]
