"""Choice of a way (number of threads, and how they wait) for one kind of work, from the times of its units only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

SLOWER, FASTER, FURTHER = 1.25, 0.95, 0.98
UNITS, SECONDS = 3, 0.03
"""Least number of units, and their least total seconds, that are timed before ways are compared; of long units two."""
SHORT = 0.05
"""Seconds of a unit up to which a trial with fewer threads costs little."""
SOON, LATE = 0.25, 30.0
"""Least and most seconds between two trials; more for long units."""
PART = 0.4
"""Part of a core that others may use without making a way short of cores."""
SURE = 8.0
"""Seconds for which results of earlier processes are trusted before a new trial."""


class Way(NamedTuple):
    """Way to do a kind of work: with this number of threads."""

    threads: int
    sleep: bool = False
    """True if waiting threads sleep at once, False if they spin first."""

    def __str__(self) -> str:
        return f"{self.threads} asleep" if self.sleep else str(self.threads)


def ways(most: int, free: bool) -> list[Way]:
    """Returns the ways to do a kind of work, the fewest resources first. If its bits are `free` of the number of
    threads, these are numbers of threads: 1, ..., most / 4, most / 2, most - 1, most; otherwise `most` threads that
    sleep while they wait, and `most` that spin."""
    if not free:
        return [Way(most, sleep=True), Way(most)]
    halves = {most >> k for k in range(most.bit_length())}
    return [Way(one) for one in sorted({*halves, most - 1} - {0})]


@dataclass
class Patience:
    """Waiting time in seconds between trials of other ways. Each trial doubles it; a long pause without trials resets
    it to the time of `units` units of work, at least `SOON`."""

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

    def put_off(self, now: float, seconds: float) -> None:
        self.last, self.wait = now, seconds


@dataclass
class Pace:
    """Choice of a way for one kind of work. Pure arithmetic: times are given to it, and it reads no clock.

    >>> pace = Pace(ways(2, free=True), cores=2)
    >>> pace.took(seconds(pace.way), now, others)
    """

    ways: Sequence[Way]
    cores: int
    at: int = -1
    """Index of the next unit's way; -1 at creation to start with the best known one."""
    usual: dict[int, float] = field(default_factory=dict)
    """Index of a way -> its last measured seconds per unit of size."""
    before: int | None = None
    """Index of the established way during a trial of another; None without a trial."""
    gains: Mapping[int, float] = field(default_factory=dict)
    """Index of a way -> ratio of its time to that of the previous way, measured by earlier processes; determines the
    first way."""
    keep: Callable[[int, float], None] = lambda at, ratio: None
    """Function that stores a newly measured ratio: index of the way, ratio of its time to that of the previous way.
    Called only if the cores of the two ways were free."""
    _times: list[float] = field(default_factory=list)
    _spent: float = 0.0
    _humbler: Patience = field(default_factory=lambda: Patience(4))
    _further: Patience = field(default_factory=lambda: Patience(16))
    _first: float | None = None
    """Time at which fewer threads are tried without a slowdown as reason; None if that is not planned."""
    _left: int | None = None
    """Index of the way that was left because others took its cores, and is resumed, without a trial, when they are
    free. None without such a way."""
    _back: Patience = field(default_factory=lambda: Patience(4))
    _unit: float = 0.0
    """Seconds of the latest unit."""

    def __post_init__(self) -> None:
        if self.at >= 0:
            return
        self.at = len(self.ways) - 1
        while self.gains.get(self.at, 0.0) >= FURTHER:
            self.at -= 1

    @property
    def way(self) -> Way:
        return self.ways[self.at]

    def prepare(self, others: float | None, now: float) -> None:
        """Adapts the way before a unit of work to the cores that others use (None if unknown): a way that lacks cores
        is left at once, and resumed when they are free."""
        if self.at > 0 and not self._room(self.at, others):
            served = self.at if self.before is None else self.before
            self._left = served if self._left is None else max(served, self._left)
            while self.at > 0 and not self._room(self.at, others):
                self.at -= 1
        elif self._left is not None and self._room(self._left, others) and self._back.due(now):
            self._back.tried(now, self._unit)
            self.at, self._left = self._left, None
        else:
            return
        self.before, self._times, self._spent = None, [], 0.0

    def took(
        self, seconds: float, now: float, others: Callable[[], float | None] = lambda: None, size: float = 1.0
    ) -> None:
        """Records a unit of work of this `size` that took `seconds` and ended at the time `now`, and decides on the
        next way. `others()`: cores used by other processes, None if unknown; called only when needed."""
        self._times.append(seconds / size)
        self._spent += seconds
        self._unit = seconds
        found, unit = median(self._times), self._spent / len(self._times)
        if self.before is not None:
            usual, count = self.usual[self.before], len(self._times)
            if self._enough(unit) or sum(self._times) > 2 * UNITS * usual:  # or far too slow to continue
                self._judge(found if self._enough(unit) else sum(self._times) / count, others())
            return
        if not self._enough(unit):
            return
        self._times, self._spent = [], 0.0
        if not self.usual:
            self._begin(now, unit, others)
        usual = self.usual.setdefault(self.at, found)
        early = self._first is not None and now >= self._first
        if self.at > 0 and (early or found > SLOWER * usual) and self._humbler.due(now):
            self._humbler.tried(now, unit)
            self._try(self.at - 1, found)
        elif self.at + 1 < len(self.ways) and self._further.due(now) and self._room(self.at + 1, others()):
            self._further.tried(now, unit)
            self._try(self.at + 1, found)

    def _begin(self, now: float, unit: float, others: Callable[[], float | None]) -> None:
        """Plans the first trials after the first way was timed: more threads, and fewer ones if units of work are
        short. If earlier processes compared these ways, and the cores used by others are known, a trial of fewer
        threads waits `SURE` seconds, and so does one of more threads if these were no faster."""
        known = (self.at in self.gains or self.at + 1 in self.gains) and others() is not None
        if unit <= SHORT:
            self._first = now + SURE if known else now
        if known and self.gains.get(self.at + 1, 0.0) >= FURTHER:
            self._further.put_off(now, SURE)

    def _room(self, at: int, others: float | None) -> bool:
        """Returns True if the way at index `at` has the cores that it needs while others use `others`; a way that
        sleeps needs none for itself, and None counts as no others."""
        way = self.ways[at]
        return others is None or way.sleep or others <= self.cores - way.threads + PART

    def _try(self, at: int, found: float) -> None:
        self.usual[self.at] = found
        self.before, self.at, self._first = self.at, at, None

    def _judge(self, found: float, others: float | None) -> None:
        assert self.before is not None
        self.usual[self.at], self._times, self._spent = found, [], 0.0
        low, high = sorted((self.at, self.before))
        if others is not None and self._room(high, others):
            self.keep(high, self.usual[high] / self.usual[low])
        if self.at > self.before:
            self._left = None
        enough = FASTER if self.at < self.before else FURTHER
        if found >= enough * self.usual[self.before]:
            self.at = self.before
        self.before = None

    def _enough(self, unit: float) -> bool:
        return len(self._times) >= (UNITS if unit < SECONDS else 2) and self._spent >= SECONDS
