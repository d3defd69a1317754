"""What is found about one kind of work, from the times of its units alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

SLOWER, FASTER, FURTHER = 1.25, 0.95, 0.98
UNITS, SECONDS = 3, 0.03
"""What is timed at least before ways are compared; of units longer than that, two."""
SHORT = 0.05
"""Seconds of a unit up to which a humbler way costs nothing to try."""
SOON, LATE = 0.25, 30.0
"""Seconds from one try to the next, at first and at most; of long units more."""
PART = 0.4
"""Of a core, which others may take of those that are counted on."""
SURE = 8.0
"""Seconds for which what was kept of earlier processes is believed before it is tried again."""


class Way(NamedTuple):
    threads: int
    sleep: bool = False
    """Whether threads sleep at once where they wait for others."""

    def __str__(self) -> str:
        return f"{self.threads} asleep" if self.sleep else str(self.threads)


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

    def put_off(self, now: float, seconds: float) -> None:
        self.last, self.wait = now, seconds


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
    gains: Mapping[int, float] = field(default_factory=dict)
    """Seconds of a way over those of the one before it, as earlier processes found them: where to begin."""
    keep: Callable[[int, float], None] = lambda at, ratio: None
    """Is told such a comparison, where others left both ways their cores."""
    _times: list[float] = field(default_factory=list)
    _spent: float = 0.0
    _humbler: Patience = field(default_factory=lambda: Patience(4))
    _further: Patience = field(default_factory=lambda: Patience(16))
    _first: float | None = None
    """When a humbler way is tried though nothing became slower."""
    _left: int | None = None
    """The way that was left because others took its cores: taken again, without a try, when they are gone."""
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
        """To be told before a unit how many cores others took of late: a way that counts on them is left at once, and
        taken again when they are gone."""
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
        """A unit of this size took so long, and ended now. `others()`: the cores that others took of late, None where
        nobody says; asked only where it matters."""
        self._times.append(seconds / size)
        self._spent += seconds
        self._unit = seconds
        found, unit = median(self._times), self._spent / len(self._times)
        if self.before is not None:
            usual, count = self.usual[self.before], len(self._times)
            if self._enough(unit) or sum(self._times) > 2 * UNITS * usual:  # or far too slow to go on with
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
        """The first way has been timed. Its neighbours are tried at once, or later, where earlier processes did that
        and somebody tells whether others have the cores."""
        known = (self.at in self.gains or self.at + 1 in self.gains) and others() is not None
        if unit <= SHORT:
            self._first = now + SURE if known else now
        if known and self.gains.get(self.at + 1, 0.0) >= FURTHER:
            self._further.put_off(now, SURE)

    def _room(self, at: int, others: float | None) -> bool:
        """Whether a way finds the cores that it counts on; one that sleeps makes do with fewer."""
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
