"""Who trains a run: held, refused, taken over, lost."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from glassformer.errors import RequestError
from glassformer.runs.owner import OWNER, Watch, owned

BEAT, PATIENCE = 0.02, 0.3


def left(place: Path, **fields: object) -> None:
    """The file of a process that is gone, or is on another machine."""
    (place / OWNER).write_text(json.dumps({"host": "elsewhere", "pid": 1, "machine": "x", "token": "t", **fields}))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with owned(tmp_path, BEAT, PATIENCE):
        assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()
        refused = pytest.raises(RequestError, match=f"is being trained by process {os.getpid()} on")
        with refused, owned(tmp_path, BEAT, PATIENCE):
            raise AssertionError
    assert not list(tmp_path.iterdir())


def test_an_owner_elsewhere_is_gone_when_it_stops_counting(tmp_path: Path) -> None:
    """By the clock of whoever watches; the file's own times are not looked at."""
    left(tmp_path)
    os.utime(tmp_path / OWNER, (0, 0))
    began = time.monotonic()
    watch = Watch(tmp_path, PATIENCE)
    assert watch.alive()
    with owned(tmp_path, BEAT, PATIENCE):
        assert time.monotonic() - began >= PATIENCE
        assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("how", ["process", "job", "torn"])
def test_one_that_is_known_to_be_gone_is_not_waited_for(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of this machine that is there no more, and the same job before it was queued again. A torn file is of
    nobody in particular and is waited for."""
    with owned(tmp_path, BEAT, PATIENCE):
        here = json.loads((tmp_path / OWNER).read_text())["machine"]
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    left(tmp_path, **{"process": {"machine": here, "pid": 2**22 + 1}, "job": {"job": "17"}, "torn": {}}[how])
    if how == "torn":
        (tmp_path / OWNER).write_text("{")
    began = time.monotonic()
    with owned(tmp_path, BEAT, PATIENCE):
        assert (time.monotonic() - began < PATIENCE) == (how != "torn")


def test_one_that_was_held_up_too_long_ends(tmp_path: Path) -> None:
    """Another one has taken over meanwhile: what it finds there is not its own, and it leaves that alone."""
    lost = threading.Event()
    with owned(tmp_path, BEAT, PATIENCE, lost.set):
        left(tmp_path)
        assert lost.wait(5)
    assert json.loads((tmp_path / OWNER).read_text())["host"] == "elsewhere"
