"""Who trains a run: owner.json in its folder, whose count goes up while the work goes on.

A lock of the file system cannot be relied on over a shared disk, and the clocks of two machines differ. So a process is
taken for gone if its count stands still for `PATIENCE` seconds of the clock of whoever watches it, or if it ran on this
machine and is there no more.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from glassformer.errors import RequestError
from glassformer.training.checkpoint import disk_errors, replace_text

OWNER = "owner.json"
BEAT = 10.0
"""Seconds from one count to the next."""
PATIENCE = 60.0
"""Seconds after which an owner that does not count is taken for gone."""
LOST = 75
"""Exit status of a process whose run another one has taken over."""


class Watch:
    """Watches the owner of a folder."""

    def __init__(self, place: Path, patience: float = PATIENCE):
        self.path, self.patience = place / OWNER, patience
        self.held: dict[str, Any] = {}
        self.since = time.monotonic()

    def alive(self) -> bool:
        """Whether there is an owner that may be at work. One that is seen for the first time may."""
        held = _read(self.path)
        if held != self.held:
            self.held, self.since = held, time.monotonic()
        return bool(held) and not _gone(held) and time.monotonic() - self.since < self.patience

    @property
    def words(self) -> str:
        return f"process {self.held.get('pid')} on {self.held.get('host')}"


@contextmanager
def owned(
    place: Path, beat: float = BEAT, patience: float = PATIENCE, lost: Callable[[], None] = lambda: os._exit(LOST)
) -> Iterator[None]:
    """Holds the folder of a run. An owner that is gone is waited for and followed; raises RequestError for one that is
    at work.

    A process that was held up so long that another one took over ends at once: `lost` is called."""
    mine = {
        "host": platform.node(), "pid": os.getpid(), "machine": _machine(), "job": os.environ.get("SLURM_JOB_ID"),
        "token": uuid.uuid4().hex,
    }  # fmt: skip
    path, ended = place / OWNER, threading.Event()
    with disk_errors(place):
        _take(path, mine, Watch(place, patience), beat)

    def count() -> None:
        number = 0
        while not ended.wait(beat):
            if _read(path).get("token", mine["token"]) != mine["token"]:
                lost()
                return
            number += 1
            with suppress(OSError):  # a full disk is for the run itself to tell
                replace_text(path, json.dumps({**mine, "count": number}))

    counting = threading.Thread(target=count, daemon=True)
    counting.start()
    try:
        yield
    finally:
        ended.set()
        counting.join()
        if _read(path).get("token") == mine["token"]:
            path.unlink(missing_ok=True)


def _take(path: Path, mine: dict[str, Any], watch: Watch, beat: float) -> None:
    """Makes the file, which one process alone can do; what a process that is gone has left is moved away first."""
    first: dict[str, Any] | None = None
    while True:
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps({**mine, "count": 0}))
            return
        except FileExistsError:
            pass
        if not watch.alive() or (mine["job"] is not None and watch.held.get("job") == mine["job"]):  # requeued
            away = path.with_name(f"{OWNER}.{mine['token']}")
            with suppress(FileNotFoundError):
                path.rename(away)
                away.unlink()
            continue
        first = first or watch.held
        if watch.held != first:
            message = f"{path.parent} is being trained by {watch.words}; wait for it or name another folder"
            raise RequestError(message, code="conflict", field="out", value=str(path.parent))
        time.sleep(min(beat, watch.patience / 10))


def _read(path: Path) -> dict[str, Any]:
    """{} where there is no such file. One that is being written reads as an owner without a name."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        tree = None
    return tree if isinstance(tree, dict) and tree else {"unreadable": text[:100]}


def _gone(held: dict[str, Any]) -> bool:
    """Whether it ran on this machine and is there no more."""
    pid = held.get("pid")
    if held.get("machine") != _machine() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _machine() -> str:
    """What tells apart two starts of a machine, and two containers of one machine that number their processes alike."""
    told = [platform.node()]
    with suppress(OSError):
        told.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        told.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(told)
