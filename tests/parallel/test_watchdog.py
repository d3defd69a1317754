"""A rank that hangs is named, with its position and the way to resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed as dist

from glassformer.parallel import watchdog
from glassformer.parallel.watchdog import LOST, Heartbeat, Seen, Watchdog, doing, patience_of, verdict
from tests.refused import refused


def seen(
    step: int = 7, waits: str = "all_gather", at: str = "a.py:1 f", moved: float = 100, heard: float = 160
) -> Seen:
    return Seen(Heartbeat(1, 1, step, at, waits, "node"), heard, moved)


def test_no_rank_is_named_while_one_moves_or_all_compute() -> None:
    assert verdict([seen(), seen(moved=150)], 160, 60) is None
    assert verdict([seen(waits=""), seen(waits="")], 160, 60) is None


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([seen(), seen(heard=100)], "rank 1 on node has not answered for 60 s, after step 7 in a.py:1 f"),
        (
            [seen(), seen(), seen(waits="", at="b.py:2 g")],
            "rank 2 on node has not reached all_gather, where 2 other ranks have waited for 60 s: it is after step 7 "
            "in b.py:2 g",
        ),
        (
            [seen(step=6), seen()],
            "rank 0 on node has not reached all_gather, where 1 other rank has waited for 60 s: it is after step 6 in "
            "a.py:1 f",
        ),
        (
            [seen(), seen(), seen(waits="broadcast", at="b.py:2 g")],
            "ranks have waited for each other for 60 s: rank 2 on node in broadcast, after step 7 in b.py:2 g, and "
            "others in all_gather, after step 7 in a.py:1 f",
        ),
        (
            [seen(), seen()],
            "all 2 ranks have waited in all_gather for 60 s, after step 7 in a.py:1 f: the network between them does "
            "not answer",
        ),
    ],
)  # fmt: skip
def test_the_rank_that_keeps_the_others_is_named(ranks: list[Seen], said: str) -> None:
    assert verdict(ranks, 160, 60) == said


def test_where_a_thread_is() -> None:
    """In a wait of this library, below a test; in no collective."""
    over = threading.Event()
    told = SimpleNamespace(set=lambda key, value: over.wait(10), check=lambda keys: False, multi_get=lambda keys: [])
    store = SimpleNamespace(clone=lambda: told)
    groups: Any = SimpleNamespace(store=store, rank=0, world=2, moves=0, leads=True)
    thread = threading.Thread(target=Watchdog, args=(groups, 60, 60, "", print, print))
    thread.start()
    time.sleep(0.2)
    at, waits = doing(thread.ident or 0)
    over.set()
    thread.join()
    assert at.startswith("parallel/watchdog.py:") and at.endswith(" _tell") and waits == ""


@pytest.mark.filterwarnings("ignore:rank 1 on")
def test_hanging_rank_is_reported_and_the_first_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that do not move: the one that is in no collective is named, only by the first, and both leave."""
    monkeypatch.setattr(watchdog, "BEAT", 0.05)
    waiting: list[int | None] = []
    monkeypatch.setattr(watchdog, "doing", lambda thread: ("loop.py:1 f", "all_gather" if thread in waiting else ""))
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    said: dict[int, list[str]] = {0: [], 1: []}
    left: dict[int, list[int]] = {0: [], 1: []}

    def rank(number: int) -> None:
        groups: Any = SimpleNamespace(store=store, rank=number, world=2, moves=3, leads=number == 0)
        Watchdog(groups, 1.0, 0.4, "use --resume", said[number].append, left[number].append).position = lambda: 5

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    threads[0].start()
    waiting.append(threads[0].ident)
    threads[1].start()
    until = time.monotonic() + 20
    while not all(left.values()) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == {0: [LOST], 1: [LOST]}
    assert len(said[0]) == 1 and said[1] == [""]
    assert "rank 1 on " in said[0][0] and said[0][0].endswith("after step 5 in loop.py:1 f; use --resume")


def test_one_that_has_ended_is_named_by_those_that_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEAT", 0.05)
    monkeypatch.setattr(watchdog, "GONE", 0.5)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def dog(rank: int) -> Watchdog:
        groups: Any = SimpleNamespace(store=store, rank=rank, world=3, moves=0, leads=rank == 0)
        return Watchdog(groups, 60, 60, "", print, print)

    one, two, three = (dog(rank) for rank in range(3))
    three.close()
    assert one.who_is_gone("Connection closed").startswith("rank 2 on ")
    assert "has died" in one.who_is_gone("Connection closed")
    two.ends("ValueError: of a callback")
    assert one.who_is_gone("Connection closed").endswith("has ended: ValueError: of a callback")
    one.close()
    two.close()


@pytest.mark.parametrize("given", ["soon", "0", "-3", "nan", "1e9"])
def test_invalid_patience_is_refused(given: str) -> None:
    with refused(code="range", field="GLASSFORMER_PATIENCE"):
        patience_of({"GLASSFORMER_PATIENCE": given})


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_is_stopped_ends_the_job(tmp_path: Path, stopped: int) -> None:
    (tmp_path / "text").write_text("the cat sat on the mat. " * 400, encoding="utf-8")
    command = [
        sys.executable, "-m", "glassformer", "train", "gpt2@1m+layers=2+d_model=32+heads=2", "--data",
        str(tmp_path / "text"), "--tokenizer", "char", "--steps", "100000", "--batch-size", "2", "--micro-batch", "1",
        "--context", "16", "--threads", "1", "--dtype", "float32", "--checkpoint-seconds", "1", "--out",
        str(tmp_path / "run"), "--layout", "replicate=2", "--processes", "2",
    ]  # fmt: skip
    environment = {**os.environ, "GLASSFORMER_PATIENCE": "8"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while process.poll() is None and not (tmp_path / "run" / "latest").exists():
        time.sleep(0.1)
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    os.kill(ranks[stopped], signal.SIGSTOP)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and "Traceback" not in said, said
    assert f"rank {stopped} on " in said and "has not answered for" in said and "--resume" in said


def test_no_thread_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that came back from the store while the interpreter ended would abort the process."""
    monkeypatch.setattr(watchdog, "BEAT", 0.01)
    asked = threading.Event()

    class Slow:
        def clone(self) -> Slow:
            return self

        def set(self, key: str, value: str) -> None:
            if threading.current_thread() is not threading.main_thread():
                asked.set()
                time.sleep(0.3)

    groups: Any = SimpleNamespace(store=Slow(), rank=0, world=1, moves=0, leads=True)
    dog = Watchdog(groups, 600, 60, "", print, print)
    assert asked.wait(20)
    dog.close()
    assert not any(thread.is_alive() for thread in dog._threads)
