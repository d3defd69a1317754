"""How many threads a piece of work takes, and how they wait for each other, found while it runs.

Threads that share a product wait for the last of them at its end. While something else has one of their cores, each of
hundreds of products waits for it, and the one that waits keeps its core busy. So every kind of work (a decoding step, a
piece of a prompt, a training step) has a `Pace` over its ways, from the humblest to the one that asks most of the
machine:

    work whose bits are the same with any number of threads     1, 2, 4, ..., n - 1, n threads
    all other work                                              n threads that sleep while they wait, n that do not

A pace is told how long the units of its work took:

    a humbler way   is taken when others have the cores that this one counts on; and tried, for nobody may tell, once at
                    the beginning, where units are short, and when they take `SLOWER` times as long as they did
    a further one   is tried when others leave it the cores
    a try           stays where units take less than `FASTER` (`FURTHER`) of what they took before

Each try doubles the time to the next, and peace makes it short again. What torch is set to is the most that is taken,
and it is set to it again afterwards; a number that was asked for is never touched (`fix`).
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

SLOWER, FASTER, FURTHER = 1.25, 0.95, 0.98
UNITS, SECONDS = 3, 0.03
"""What is timed at least before ways are compared; of units longer than that, two."""
SHORT = 0.05
"""Seconds of a unit up to which a humbler way costs nothing to try."""
SOON, LATE = 0.25, 30.0
"""Seconds from one try to the next, at first and at most; of long units more."""
PART = 0.4
"""Of a core, which others may take of those that are counted on."""


class Way(NamedTuple):
    threads: int
    sleep: bool = False
    """Whether threads sleep at once where they wait for others."""


def ways(most: int, free: bool) -> list[Way]:
    """Those of work whose bits are `free` of the number of threads, and of other work."""
    if not free:
        return [Way(most, sleep=True), Way(most)]
    halves = {most >> k for k in range(most.bit_length())}
    return [Way(one) for one in sorted({*halves, most - 1} - {0})]


@dataclass
class Patience:
    """When the next try may be. Each doubles the wait, which a long peace makes short again: `units` of the work, and
    not less than `SOON`."""

    units: int
    wait: float = 0.0
    last: float = float("-inf")

    def due(self, now: float) -> bool:
        return now >= self.last + self.wait

    def tried(self, now: float, unit: float) -> None:
        least = max(SOON, self.units * unit)
        peace = now - self.last > 8 * max(self.wait, least)
        self.wait = least if peace else min(2 * max(self.wait, least), max(LATE, 8 * least))
        self.last = now


@dataclass
class Pace:
    """One kind of work. Plain arithmetic: times are given to it, and it reads no clock.

    >>> pace = Pace(ways(2, free=True), cores=2)
    >>> pace.took(seconds(pace.way), now, others)
    """

    ways: Sequence[Way]
    cores: int
    at: int = -1
    """Which way the next unit takes."""
    usual: dict[int, float] = field(default_factory=dict)
    """Seconds of what has size 1, each way, when they were last looked at."""
    before: int | None = None
    """The way instead of which this one is tried."""
    _times: list[float] = field(default_factory=list)
    _spent: float = 0.0
    _humbler: Patience = field(default_factory=lambda: Patience(4))
    _further: Patience = field(default_factory=lambda: Patience(16))

    def __post_init__(self) -> None:
        self.at = self.at if self.at >= 0 else len(self.ways) - 1

    @property
    def way(self) -> Way:
        return self.ways[self.at]

    def prepare(self, others: float | None) -> None:
        """To be told before a unit how many cores others took of late: a way that counts on them is left at once."""
        if self.at == 0 or self._room(self.at, others):
            return
        while self.at > 0 and not self._room(self.at, others):
            self.at -= 1
        self.before, self._times, self._spent = None, [], 0.0

    def took(
        self, seconds: float, now: float, others: Callable[[], float | None] = lambda: None, size: float = 1.0
    ) -> None:
        """A unit of this size took so long, and ended now. `others()`: the cores that others took of late, None where
        nobody says; asked only where it matters."""
        self._times.append(seconds / size)
        self._spent += seconds
        found, unit = median(self._times), self._spent / len(self._times)
        if self.before is not None:
            usual, count = self.usual[self.before], len(self._times)
            if self._enough(unit) or sum(self._times) > 2 * UNITS * usual:  # or far too slow to go on with
                self._judge(found if self._enough(unit) else sum(self._times) / count)
            return
        if not self._enough(unit):
            return
        self._times, self._spent = [], 0.0
        new = not self.usual and unit <= SHORT
        usual = self.usual.setdefault(self.at, found)
        if self.at > 0 and (new or found > SLOWER * usual) and self._humbler.due(now):
            self._humbler.tried(now, unit)
            self._try(self.at - 1, found)
        elif self.at + 1 < len(self.ways) and self._further.due(now) and self._room(self.at + 1, others()):
            self._further.tried(now, unit)
            self._try(self.at + 1, found)

    def _room(self, at: int, others: float | None) -> bool:
        """Whether a way finds the cores that it counts on; one that sleeps makes do with fewer."""
        way = self.ways[at]
        return others is None or way.sleep or others <= self.cores - way.threads + PART

    def _try(self, at: int, found: float) -> None:
        self.usual[self.at] = found
        self.before, self.at = self.at, at

    def _judge(self, found: float) -> None:
        assert self.before is not None
        self.usual[self.at], self._times, self._spent = found, [], 0.0
        enough = FASTER if self.at < self.before else FURTHER
        if found >= enough * self.usual[self.before]:
            self.at = self.before
        self.before = None

    def _enough(self, unit: float) -> bool:
        return len(self._times) >= (UNITS if unit < SECONDS else 2) and self._spent >= SECONDS


class Others:
    """Cores that other processes took of late, of those this one may use: by Linux's count of their busy time, less
    what this process took itself. None where nobody counts, or it was not looked at lately."""

    LEAST, MOST = 0.25, 1.0
    """Seconds between two looks: time is counted in hundredths, and what was long ago is not what is now. After that it
    is the number of those that run at this moment, and go on for some moments more: what has just ended turns round for
    some milliseconds."""
    MOMENTS, MOMENT = 3, 0.005

    def __init__(self) -> None:
        self._look = self._counted()
        self._found: float | None = None

    def __call__(self) -> float | None:
        if self._look is None or (seconds := time.perf_counter() - self._look[0]) < self.LEAST:
            return self._found
        then, self._look = self._look, self._counted()
        if self._look is None:
            self._found = None
        elif seconds <= self.MOST:
            self._found = max(0.0, self._look[1] - then[1]) / seconds
        else:
            self._found = self._look[2]
            for _ in range(self.MOMENTS):
                if not self._found:
                    break
                time.sleep(self.MOMENT)
                self._found = min(self._found, (self._counted() or self._look)[2] or 0.0)
        return self._found

    @staticmethod
    def _counted() -> tuple[float, float, float | None] | None:
        """Seconds on the clock, those that all others had of these cores, and the others that run now; None where this
        process has some of the cores alone, and they are not told apart."""
        try:
            here = os.sched_getaffinity(0)
            with open("/proc/stat", encoding="ascii") as file:
                rows = [line.split() for line in file if line.startswith(("cpu", "procs_running"))]
            cores = [row for row in rows if row[0][3:].isdecimal()]
            # user, nice, system, idle, waiting, interrupts of two kinds; what a host stole is taken from all alike
            ticks = sum(int(row[i]) for row in cores if int(row[0][3:]) in here for i in (1, 2, 3, 6, 7))
            running = [float(row[1]) - 1 for row in rows if row[0] == "procs_running" and len(cores) == len(here)]
            others = ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
            return time.perf_counter(), others, running[0] if running else None
        except (OSError, AttributeError, ValueError, IndexError):
            return None


class Crowd:
    """Makes the threads of GNU's OpenMP sleep where they wait. They turn round for some milliseconds first, unless
    there are more of them than cores: so while this runs there are, in a thread that does nothing."""

    def __init__(self) -> None:
        self.stop, there = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._stand, args=(there,), daemon=True)
        self.thread.start()
        there.wait()

    def _stand(self, there: threading.Event) -> None:
        try:
            openmp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD)  # torch's own
            nothing = ctypes.cast(openmp.omp_in_parallel, ctypes.c_void_p)
            openmp.GOMP_parallel(nothing, None, ctypes.c_uint(max(2, os.cpu_count() or 1)), ctypes.c_uint(0))
        except (OSError, AttributeError):  # another OpenMP, which waits as it does
            pass
        finally:
            there.set()
        self.stop.wait()

    def end(self) -> None:
        self.stop.set()
        self.thread.join()


class Loading:
    """Whose work loading is: there is no model yet."""


LOADING = Loading()
_others = Others()
_crowd: Crowd | None = None
_fixed = bool(os.environ.get("OMP_NUM_THREADS"))
_paces: WeakKeyDictionary[Any, dict[Hashable, Pace]] = WeakKeyDictionary()


def fix(fixed: bool) -> None:
    """Whether the number that torch is set to was asked for, and stays."""
    global _fixed
    _fixed = fixed
    sleeping(False)


def fixed() -> bool:
    return _fixed


def pace(owner: Any, kind: Hashable, free: bool) -> Pace | None:
    """That of this kind of work on `owner`, a model mostly; None where there is nothing to choose."""
    most = torch.get_num_threads()
    if _fixed or most == 1:
        return None
    paces = _paces.setdefault(owner, {})
    key = (kind, most, free)
    if key not in paces:
        paces[key] = Pace(ways(most, free), _cores())
    return paces[key]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def paced(owner: Any, kind: Hashable, size: float = 1.0, free: bool = True) -> Iterator[None]:
    """Inside, a unit of work of this kind, of this size (tokens, bytes), goes the way that it does best with. `free`:
    its bits are the same with any number of threads. Units inside others are not counted."""
    # Whoever compiles what runs inside would have all of this in the graph.
    mine = None if torch.compiler.is_compiling() or _busy.unit else pace(owner, kind, free)
    if mine is None:
        yield
        return
    _busy.unit = True
    mine.prepare(_others())
    way, before = mine.way, torch.get_num_threads()
    sleeping(way.sleep)
    if way.threads != before:
        torch.set_num_threads(way.threads)
    began = time.perf_counter()
    try:
        yield
    finally:
        ended = time.perf_counter()
        if way.threads != before:
            torch.set_num_threads(before)
        _busy.unit = False
    mine.took(ended - began, ended, _others, size)


@contextmanager
def at_most(count: int) -> Iterator[None]:
    """Inside, torch takes so many threads, or fewer where it is set to fewer, and nothing is chosen."""
    before, unit = torch.get_num_threads(), _busy.unit
    torch.set_num_threads(min(count, before))
    _busy.unit = True
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _busy.unit = unit


class _Busy(threading.local):
    unit = False


_busy = _Busy()


def sleeping(wanted: bool) -> None:
    """Whether threads sleep while they wait, from now on."""
    global _crowd
    if wanted and _crowd is None:
        _crowd = Crowd()
    elif not wanted and _crowd is not None:
        _crowd.end()
        _crowd = None
