"""Watchdog of the ranks of a run: names a rank that hangs, has died, or is missing where the others wait.

Every rank writes a heartbeat once a second, with the place of its main thread, into the store that all reach; a thread
of the first rank reads all, and a thread of each other reads the first's. A step only increments a counter.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassformer.errors import RequestError, WorkError

if TYPE_CHECKING:
    from glassformer.parallel.process_groups import ProcessGroups

BEAT = 1.0
"""Seconds between two heartbeats of a rank."""
CLOSING = 10.0
"""Most seconds to wait for a watchdog thread to end."""
GONE = 4.0
"""Seconds without a heartbeat after which a rank counts as dead, once a collective has failed."""
NOTED = 60.0
"""Seconds without progress of any rank after which a warning names the rank that the others wait for."""
PATIENCE = 600.0
"""Default seconds without progress of any rank after which the job ends; GLASSFORMER_PATIENCE overrides it."""
LOST = 75
"""Exit status of a rank that ends because of another."""
KEY = "watchdog"
VERDICT = f"{KEY}/verdict"
"""Key of the store with the first rank's finding, at which all other ranks end."""


@dataclass(frozen=True)
class Heartbeat:
    """State that a rank writes into the store once a second."""

    beat: int
    moves: int
    """Value of `ProcessGroups.moves`, a counter of progress."""
    step: int
    at: str
    """Place of the rank's main thread in this library, such as training/loop.py:93 to_the_end."""
    waits: str
    """Name of the collective in which the rank waits; empty outside of one."""
    host: str
    ended: str = ""
    """Reason why the rank has left the run; empty while it runs."""


@dataclass
class Seen:
    """Last heartbeat of a rank, with the reader's times in seconds when it arrived (`heard`) and when the rank last
    made progress (`moved`)."""

    sign: Heartbeat
    heard: float
    moved: float

    def take(self, sign: Heartbeat, now: float) -> None:
        if sign.beat != self.sign.beat:
            self.heard = now
        if (sign.moves, sign.step, sign.ended) != (self.sign.moves, self.sign.step, self.sign.ended):
            self.moved = now
        self.sign = sign


def verdict(seen: Sequence[Seen], now: float, patience: float) -> str | None:
    """Returns a sentence about a run without progress for `patience` seconds, which names the rank that is silent or
    late and its place; None if some rank made progress, or if all answer and no rank waits. `now`: the reader's time in
    seconds."""
    still = now - max(one.moved for one in seen)
    if still < patience:
        return None
    if silent := [rank for rank, one in enumerate(seen) if now - one.heard >= patience / 2]:
        first = seen[silent[0]]
        return f"{_name(silent[0], first)} has not answered for {now - first.heard:.0f} s, {_where(first)}"
    waiting = [one for one in seen if one.sign.waits]
    if not waiting:
        return None
    latest = max(one.sign.step for one in seen)
    away = [rank for rank, one in enumerate(seen) if not one.sign.waits]
    if away := away or [rank for rank, one in enumerate(seen) if one.sign.step < latest]:
        late, others = seen[away[0]], [one for rank, one in enumerate(seen) if one.sign.waits and rank != away[0]]
        count = "1 other rank has" if len(others) == 1 else f"{len(others)} other ranks have"
        return (
            f"{_name(away[0], late)} has not reached {others[0].sign.waits}, where {count} waited for {still:.0f} s: "
            f"it is {_where(late)}"
        )
    places = Counter((one.sign.waits, one.sign.at) for one in seen)
    if len(places) == 1:
        return (
            f"all {len(seen)} ranks have waited in {waiting[0].sign.waits} for {still:.0f} s, {_where(seen[0])}: the "
            "network between them does not answer"
        )
    rarest = min(places.values())
    odd, rare = next((rank, one) for rank, one in enumerate(seen) if places[one.sign.waits, one.sign.at] == rarest)
    other = next(one for one in seen if (one.sign.waits, one.sign.at) != (rare.sign.waits, rare.sign.at))
    return (
        f"ranks have waited for each other for {still:.0f} s: {_name(odd, rare)} in {rare.sign.waits}, {_where(rare)}, "
        f"and others in {other.sign.waits}, {_where(other)}"
    )


def _name(rank: int, one: Seen) -> str:
    return f"rank {rank} on {one.sign.host}"


def _where(one: Seen) -> str:
    return f"after step {one.sign.step}" + (f" in {one.sign.at}" if one.sign.at else "")


def doing(thread: int) -> tuple[str, str]:
    """Returns (place of a thread in this library, name of the torch collective it is in or "")."""
    frame, here, waits = sys._current_frames().get(thread), str(Path(__file__).parents[1]), ""
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(here):
            place = Path(file).relative_to(here).as_posix()
            return f"{place}:{frame.f_lineno} {name}", waits
        if os.path.join("torch", "distributed") in file and name not in ("wrapper", "wrapped"):
            waits = name
        frame = frame.f_back
    return "", waits


class Watchdog:
    """Threads of a rank that write its heartbeats, and name the rank that the others wait for.

    groups     the run's ranks; heartbeats are written into its `store`
    patience   seconds without progress of any rank, after which this process ends
    noted      seconds without progress of any rank, after which a warning names one
    again      command to resume, for the end of the sentence
    say        function that prints a sentence
    leave      function that ends this process with a status; its main thread waits in an uninterruptible call
    """

    def __init__(
        self, groups: ProcessGroups, patience: float, noted: float, again: str, say: Callable[[str], None],
        leave: Callable[[int], None],
    ):  # fmt: skip
        self.groups, self.patience, self.noted = groups, patience, noted
        self.again, self._say, self._leave = again, say, leave
        self.position: Callable[[], int] = int
        """Function that returns the number of finished steps."""
        store: Any = groups.store
        self._store = store.clone()
        self._main, self._over, self._lock = threading.get_ident(), threading.Event(), threading.Lock()
        self._beat, self._ended, self._warned = 0, "", False
        self._answered = time.monotonic()
        """Time in seconds of the store's last answer. Its process may be stopped, and then a call waits without end."""
        self.seen: dict[int, Seen] = {}
        self._tell()
        works = (self._watch, self._mind_the_store)
        self._threads = [threading.Thread(target=work, daemon=True, name="watchdog") for work in works]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads, because one that is in a call to the store when the interpreter ends would abort the
        process."""
        self._over.set()
        for thread in self._threads:
            thread.join(CLOSING)

    def _key(self, rank: int) -> str:
        return f"{KEY}/{rank}"

    def _tell(self) -> None:
        self._beat += 1
        at, waits = doing(self._main)
        sign = Heartbeat(
            self._beat, self.groups.moves, self.position(), at, waits, socket.gethostname(), self._ended[:300]
        )
        self._store.set(self._key(self.groups.rank), json.dumps(asdict(sign)))

    def _look(self, ranks: Sequence[int]) -> None:
        """Reads the heartbeats of `ranks` from the store into `seen`; ranks that have not written any are left out."""
        there = [rank for rank in ranks if rank in self.seen or self._store.check([self._key(rank)])]
        for rank, text in zip(there, self._store.multi_get([self._key(rank) for rank in there]), strict=True):
            sign, now = Heartbeat(**json.loads(text)), time.monotonic()
            if rank not in self.seen:
                self.seen[rank] = Seen(sign, now, now)
            self.seen[rank].take(sign, now)

    def _watch(self) -> None:
        while not self._over.wait(BEAT):
            with suppress(RuntimeError), self._lock:  # `_mind_the_store` reports a store that does not answer
                said = self._one_beat()
                self._answered = time.monotonic()
                if said is not None:
                    self._end(said)
                    return

    def _end(self, said: str) -> None:
        """Prints the sentence `said` and ends this process; on the first rank it also ends the others, which print
        nothing."""
        self._say(said and f"{said}; {self.again}")
        if self.groups.leads:
            self._store.set(VERDICT, said)
            time.sleep(3 * BEAT)  # the store may end with this process: gives the others time to read
        self._leave(LOST)

    def _mind_the_store(self) -> None:
        while not self._over.wait(BEAT):
            silent = time.monotonic() - self._answered
            if silent >= self.patience + 3 * BEAT:
                name = _name(0, self.seen[0]) if 0 in self.seen else "rank 0"
                self._end(f"{name} has not answered for {silent:.0f} s")
                return

    def _one_beat(self) -> str | None:
        """Writes this rank's heartbeat and reads the others'; returns the sentence with which the run has to end, "" if
        another rank prints it, None if the run continues."""
        self._tell()
        if self.groups.rank:
            self._look([0])
            if self._store.check([VERDICT]):
                return ""
            first = self.seen.get(0)
            silent = 0.0 if first is None else time.monotonic() - first.heard
            if first is None or silent < self.patience:
                return None
            return f"{_name(0, first)} has not answered for {silent:.0f} s, {_where(first)}"
        self._look(range(self.groups.world))
        if len(self.seen) < self.groups.world:
            return None
        seen, now = [self.seen[rank] for rank in range(self.groups.world)], time.monotonic()
        if (said := verdict(seen, now, self.patience)) is not None:
            return said
        found = verdict(seen, now, min(self.noted, self.patience / 2))
        if found is not None and not self._warned:
            warnings.warn(f"{found}; this ends after {self.patience:.0f} s (GLASSFORMER_PATIENCE)")
        self._warned = found is not None
        return None

    def ends(self, reason: str) -> None:
        """Writes into the store the reason why this rank leaves the run."""
        self._ended = reason or "it has ended"
        with suppress(RuntimeError), self._lock:
            self._tell()

    def who_is_gone(self, reason: str) -> str:
        """Returns a sentence that names the rank that made a collective fail here; if no such rank is known, it quotes
        the error `reason`."""
        with suppress(RuntimeError), self._lock:
            self._look(range(self.groups.world))
        known = {rank: one.sign.host for rank, one in self.seen.items()}
        until = time.monotonic() + GONE + 2 * BEAT
        while time.monotonic() < until:
            try:
                with self._lock:
                    self._tell()
                    self._look(range(self.groups.world))
            except RuntimeError:
                return f"rank 0{' on ' + known[0] if 0 in known else ''} has died"
            for rank, one in self.seen.items():
                if one.sign.ended:
                    return f"{_name(rank, one)} has ended: {one.sign.ended}"
                if time.monotonic() - one.heard > GONE:
                    return f"{_name(rank, one)} has died, {_where(one)}"
            time.sleep(BEAT / 4)
        return f"rank {self.groups.rank} of {self.groups.world} has lost the others: {reason}"


def patience_of(environment: Any = os.environ) -> float:
    """Returns the seconds in GLASSFORMER_PATIENCE, or PATIENCE if it is not set. Raises RequestError."""
    given = environment.get("GLASSFORMER_PATIENCE", "")
    try:
        value = float(given or PATIENCE)
    except ValueError:
        value = 0.0
    if not 5 <= value <= 7 * 86400:
        raise RequestError(
            f"GLASSFORMER_PATIENCE={given[:40]} must be a number of seconds from 5 to {7 * 86400:,}",
            code="range", field="GLASSFORMER_PATIENCE", value=given[:40], expected="seconds, 5 or more",
        )  # fmt: skip
    return value


Follow = Callable[[Callable[[], int]], None]


@contextmanager
def watched(groups: ProcessGroups, again: str) -> Iterator[Follow]:
    """Runs a watchdog during the block: a rank that hangs ends the job with a sentence that names it; if a rank died,
    the others raise WorkError with its name. `again`: command to resume. Yields a function to call once with a function
    that returns the number of finished steps."""
    if groups.world == 1 or groups.store is None:
        yield lambda position: None
        return
    dog = Watchdog(groups, patience_of(), NOTED, again, _say, os._exit)

    def follow(position: Callable[[], int]) -> None:
        dog.position = position

    try:
        yield follow
    except Exception as error:
        if not isinstance(error, RequestError | WorkError) and is_of_others(error):
            raise WorkError(f"{dog.who_is_gone(' '.join(str(error).split())[:200])}; {again}", code="process") from None
        dog.ends(f"{type(error).__name__}: {' '.join(str(error).split())}")
        raise
    finally:
        dog.close()


def _say(said: str) -> None:
    if said:
        shown = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar hides the cursor
        print(f"{shown}glassformer: {said}", file=sys.stderr, flush=True)


def is_of_others(error: BaseException) -> bool:
    """Returns True if the error is the failure of a collective, which another rank causes."""
    from torch.distributed import DistError

    words = ("Connection closed by peer", "Connection reset", "Connection refused", "Timed out", "NCCL", "gloo")
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )
