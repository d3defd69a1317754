"""The cores that other processes take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator


class Others:
    """Cores that other processes took of late, of those this one may use: by Linux's count of their busy time, less
    what this process took itself. None where nobody counts, or it was not looked at lately."""

    LEAST, MOST = 0.25, 1.0
    """Seconds between two looks: time is counted in hundredths, and what was long ago is not what is now. After a pause
    longer than that it is the number of those that run at this moment."""
    MOMENTS, MOMENT = 10, 0.003
    """So often, and so many seconds apart, those that run after a pause are counted again, unless they were there
    before it and all through it: threads of what has just ended turn round for up to some 20 ms."""

    def __init__(self, stat: CoreTimes | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        self._stat, self._sleep = stat or CoreTimes(), sleep
        self._look = self._stat.counted()
        self._found: float | None = None

    def __call__(self, worked: bool = False) -> float | None:
        """`worked`: there was no pause since the last look."""
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
        """Those of the running that go on, of which so many were known before."""
        running = self._stat.running()
        for _ in range(self.MOMENTS):
            if not running or running - known < 0.5:
                break
            self._sleep(self.MOMENT)
            running = min(running, self._stat.running() or 0.0)
        return running


def seconds_since_start(proc: str = "/proc") -> float | None:
    """Returns the seconds since this process started, by Linux's count; None on another system."""
    try:
        with open(f"{proc}/self/stat", encoding="utf-8", errors="replace") as file:
            started = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        with open(f"{proc}/uptime", encoding="ascii") as file:
            return float(file.read().split()[0]) - started
    except (OSError, ValueError, IndexError):
        return None


class CoreTimes:
    """Linux's count of the time that each core was busy, and of the threads that run.

    proc    the folder in which Linux counts
    cores   numbers of the cores of this process; if None, it is asked
    clock   seconds
    own     seconds that this process computed
    ticks   the unit of the counts: ticks in a second; if None, the system is asked"""

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
        """Seconds on the clock, and those that all others had of these cores; None where nobody counts."""
        try:
            here = self._here()
            cores = [row for row in self._rows("cpu") if row[0][3:].isdecimal() and int(row[0][3:]) in here]
            # user, nice, system, idle, waiting, interrupts of two kinds; what a host stole is taken from all alike
            busy = sum(int(row[i]) for row in cores for i in (1, 2, 3, 6, 7))
            return self.clock(), busy / (self._ticks or os.sysconf("SC_CLK_TCK")) - self._own()
        except (OSError, AttributeError, ValueError, IndexError):
            return None

    def running(self) -> float | None:
        """Threads of others that run now; None where this process has only some of the cores, as they are of all."""
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
        """Threads of this process that run."""
        count = 0
        for thread in os.listdir(f"{self.proc}/self/task"):
            try:
                with open(f"{self.proc}/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                    count += file.read().rpartition(")")[2].split()[:1] == ["R"]
            except OSError:  # it has ended
                pass
        return max(1, count)

    def _rows(self, begin: str) -> Iterator[list[str]]:
        with open(f"{self.proc}/stat", encoding="ascii") as file:
            yield from (line.split() for line in file if line.startswith(begin))
