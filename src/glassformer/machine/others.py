"""Measurement of the cores that other processes use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator


class Others:
    """Function that returns the number of cores that other processes used recently, of those that this process may use:
    Linux's busy time minus this process's. None if the system does not count, or without a recent sample."""

    LEAST, MOST = 0.25, 1.0
    """Shortest and longest seconds between two samples: time is counted in hundredths, and an old count is not current.
    After a longer pause, the threads that run at the moment are counted instead."""
    MOMENTS, MOMENT = 10, 0.003
    """Most counts of running threads after a pause, and seconds between them: threads of a process that has just ended
    spin for up to some 20 ms, so that one count could include them."""

    def __init__(self, stat: CoreTimes | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        self._stat, self._sleep = stat or CoreTimes(), sleep
        self._look = self._stat.counted()
        self._found: float | None = None

    def __call__(self, worked: bool = False) -> float | None:
        """Returns the mean number of cores (1.5, say) that other processes have used since the last sample; None if
        unknown. If the sample is older than `MOST` seconds, running threads are counted instead, except after work
        (`worked`)."""
        if self._look is None or (seconds := self._stat.clock() - self._look[0]) < self.LEAST:
            return self._found
        then, self._look = self._look, self._stat.counted()
        if self._look is None:
            self._found = None
            return None
        meanwhile = max(0.0, self._look[1] - then[1]) / seconds
        if worked or seconds <= self.MOST:
            self._found = meanwhile
        else:
            self._found = self._lasting(min(meanwhile, self._found or 0.0))
        return self._found

    def _lasting(self, known: float) -> float | None:
        """Returns the fewest running threads of other processes over up to `MOMENTS` counts; stops at `known`, the
        cores that others used before. None if unknown."""
        running = self._stat.running()
        for _ in range(self.MOMENTS):
            if not running or running - known < 0.5:
                break
            self._sleep(self.MOMENT)
            running = min(running, self._stat.running() or 0.0)
        return running


def seconds_since_start(proc: str = "/proc") -> float | None:
    """Returns the seconds since this process started, by Linux's files in `proc`; None on another system."""
    try:
        with open(f"{proc}/self/stat", encoding="utf-8", errors="replace") as file:
            started = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        with open(f"{proc}/uptime", encoding="ascii") as file:
            return float(file.read().split()[0]) - started
    except (OSError, ValueError, IndexError):
        return None


class CoreTimes:
    """Reader of Linux's counts: the time that each core was busy, and the threads that run.

    proc    folder of Linux's counts
    cores   numbers of the cores of this process; if None, its affinity
    clock   function that returns the time in seconds
    own     function that returns the CPU seconds of this process
    ticks   ticks in a second, the unit of the counts; if None, the system's"""

    def __init__(
        self,
        proc: str = "/proc",
        cores: set[int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        own: Callable[[], float] = time.process_time,
        ticks: int | None = None,
    ):
        self.proc, self._cores, self.clock, self._own, self._ticks = proc, cores, clock, own, ticks

    def counted(self) -> tuple[float, float] | None:
        """Returns (time in seconds, total busy seconds of all other processes on these cores); None if the system does
        not count."""
        try:
            here = self._here()
            cores = [row for row in self._rows("cpu") if row[0][3:].isdecimal() and int(row[0][3:]) in here]
            # user, nice, system, idle, waiting, interrupts of two kinds; without stolen time, which affects all alike
            busy = sum(int(row[i]) for row in cores for i in (1, 2, 3, 6, 7))
            return self.clock(), busy / (self._ticks or os.sysconf("SC_CLK_TCK")) - self._own()
        except (OSError, AttributeError, ValueError, IndexError):
            return None

    def running(self) -> float | None:
        """Returns the number of running threads of other processes; None if unknown, also if this process has only some
        of the cores, because Linux counts threads on all."""
        try:
            cores = sum(row[0][3:].isdecimal() for row in self._rows("cpu"))
            if cores != len(self._here()):
                return None
            return max(0.0, float(next(self._rows("procs_running"))[1]) - self._own_running())
        except (OSError, AttributeError, ValueError, IndexError, StopIteration):
            return None

    def _here(self) -> set[int]:
        return os.sched_getaffinity(0) if self._cores is None else self._cores

    def _own_running(self) -> int:
        """Returns the number of running threads of this process."""
        count = 0
        for thread in os.listdir(f"{self.proc}/self/task"):
            try:
                with open(f"{self.proc}/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                    count += file.read().rpartition(")")[2].split()[:1] == ["R"]
            except OSError:  # the thread has ended
                pass
        return max(1, count)

    def _rows(self, begin: str) -> Iterator[list[str]]:
        with open(f"{self.proc}/stat", encoding="ascii") as file:
            yield from (line.split() for line in file if line.startswith(begin))
