"""Choice of the number of threads for each kind of work, and of their waiting, measured while it runs.

Threads that share a matmul wait for the last of them at its end. While another process has one of their cores, each of
hundreds of matmuls waits for it, and a waiting thread keeps its core busy. So every kind of work (a decoding step, a
piece of a prompt, a training step) has a `Pace` over its ways, from the fewest resources to the most:

    work whose bits are the same with any number of threads     1, 2, 4, ..., n - 1, n threads
    all other work                                              n threads that sleep while they wait, n that do not

A pace starts with the best way of this kind of work on this processor in earlier processes (`thread_cache.py`), else
with the last, and is given the time of each unit of work:

    a lower way     is taken when others use the cores that the current one needs; and tried, since their use may be
                    unknown, once at the start if units are short (some seconds later if results are stored), and when
                    they take `SLOWER` times as long as before
    a higher one    is tried when others leave its cores free; one that was left because of them is taken again at once
    a trial         succeeds if units take less than `FASTER` (`FURTHER`) of the time before

Each trial doubles the time to the next, and a long pause resets it. Torch's setting is the maximum, and is restored
afterwards; a number that the user gave is never changed (`fix`).
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from glassformer.machine import processor, thread_cache
from glassformer.machine.others import Others
from glassformer.machine.pace import Pace, ways


class Loading:
    """Owner of the work of loading, at a time when no model exists yet."""


LOADING = Loading()


class _Busy(threading.local):
    unit = False
    """True inside a timed unit of work."""
    held = False
    """True inside `at_most`."""
    seconds = 0.0
    """Total seconds of the units that have ended."""


_busy = _Busy()


class Pacing:
    """Paces of every kind of work of this process.

    others   function that returns the number of cores that other processes use, as an `Others`
    clock    function that returns the time in seconds
    fixed    True if the user gave torch's number of threads, which is then never changed
    make     function that makes the pace of a new kind of work"""

    def __init__(
        self,
        others: Callable[..., float | None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        fixed: bool = False,
        make: Callable[..., Pace] = Pace,
    ):
        self.others, self.clock, self.fixed, self.make = others or Others(), clock, fixed, make
        self.paces: WeakKeyDictionary[Any, dict[Hashable, Pace]] = WeakKeyDictionary()
        self._sizes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._crowd: Crowd | None = None

    def pace(self, owner: Any, kind: Hashable, free: bool) -> Pace | None:
        """Returns the pace of this kind of work on `owner`, usually a model; None if the number of threads is fixed.
        `free`: True if the work's bits do not depend on that number."""
        most = torch.get_num_threads()
        if self.fixed or most == 1:
            return None
        paces = self.paces.setdefault(owner, {})
        key = (kind, most, free)
        if key not in paces:
            work, open_to = f"{kind} on 2^{self._size(owner)} bytes", ways(most, free)
            known, keep = thread_cache.gains(work, open_to), partial(thread_cache.keep, work, open_to)
            paces[key] = self.make(open_to, processor.own_cores(), gains=known, keep=keep)
        return paces[key]

    def _size(self, owner: Any) -> int:
        """Returns the number of binary digits of a model's bytes, or of those of the model that `owner` holds; 0 for
        another owner."""
        if owner not in self._sizes:
            model = getattr(owner, "model", owner)
            tensors = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
            self._sizes[owner] = sum(tensor.nbytes for tensor in tensors).bit_length()
        return self._sizes[owner]

    @contextmanager
    def paced(
        self, owner: Any, kind: Hashable, size: float = 1.0, free: bool = True, apart: bool = False
    ) -> Iterator[None]:
        # Returns early, because a compiler would include all of this in the graph.
        inside = _busy.unit
        idle = torch.compiler.is_compiling() or (inside and not apart) or _busy.held
        mine = None if idle else self.pace(owner, kind, free)
        if mine is None:
            yield
            return
        _busy.unit = True
        mine.prepare(self.others(), self.clock())
        way, before, slept = mine.way, torch.get_num_threads(), self.asleep
        self.sleep(way.sleep)
        if way.threads != before:
            torch.set_num_threads(way.threads)
        began, earlier = self.clock(), _busy.seconds
        try:
            yield
        finally:
            ended = self.clock()
            if way.threads != before:
                torch.set_num_threads(before)
            if inside:
                self.sleep(slept)
            _busy.unit = inside
            took = ended - began - (_busy.seconds - earlier)
            _busy.seconds = earlier + ended - began
        if took > Others.LEAST:
            self.others(worked=True)
        mine.took(took, ended, self.others, size)

    @property
    def asleep(self) -> bool:
        """True if torch's threads sleep while they wait."""
        return self._crowd is not None

    def sleep(self, wanted: bool) -> None:
        """Makes torch's threads sleep while they wait, or spin if `wanted` is False."""
        if wanted and self._crowd is None:
            self._crowd = Crowd()
        elif not wanted and self._crowd is not None:
            self._crowd.end()
            self._crowd = None


_process = Pacing(fixed=bool(os.environ.get("OMP_NUM_THREADS")))


@contextmanager
def using(pacing: Pacing) -> Iterator[Pacing]:
    """Replaces the paces of this process by `pacing` inside the block; for tests."""
    global _process
    before, _process = _process, pacing
    try:
        yield pacing
    finally:
        pacing.sleep(False)
        _process = before


def fix(fixed: bool) -> None:
    """Sets whether the user gave torch's number of threads, which is then never changed."""
    _process.fixed = fixed
    _process.sleep(False)


def fixed() -> bool:
    return _process.fixed


def paced(
    owner: Any, kind: Hashable, size: float = 1.0, free: bool = True, apart: bool = False
) -> AbstractContextManager[None]:
    """Returns a context for a unit of work of this kind and size (tokens, bytes), which runs in the way chosen for it.
    `free`: its bits are the same with any number of threads. A unit inside another is not counted, unless it is
    `apart`: it then has a separate pace, and the outer unit's time excludes it."""
    return _process.paced(owner, kind, size, free, apart)


@contextmanager
def at_most(count: int) -> Iterator[None]:
    """Limits torch to `count` threads inside the block, and prevents any other choice of threads."""
    before, held = torch.get_num_threads(), _busy.held
    torch.set_num_threads(min(count, before))
    _busy.held = True
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _busy.held = held


class Beat:
    """Timer of units of work whose ends only are known: each lasts from the previous end, without the time of units of
    other kinds."""

    def __init__(self, kind: Hashable):
        self.kind = kind
        self.began: tuple[float, float] | None = None

    def __call__(self, owner: Any) -> None:
        """Ends a unit of work on `owner`, and starts the next one."""
        here = _process
        mine = None if _busy.unit or _busy.held else here.pace(owner, self.kind, free=False)
        if mine is None:
            self.began = None
            return
        now = here.clock()
        if self.began is not None:
            took = now - self.began[0] - (_busy.seconds - self.began[1])
            if took > Others.LEAST:
                here.others(worked=True)
            mine.took(took, now, here.others)
        mine.prepare(here.others(), now)
        here.sleep(mine.way.sleep)
        self.began = here.clock(), _busy.seconds


class Crowd:
    """Idle thread that makes waiting threads of GNU's OpenMP sleep. Such threads spin for some milliseconds first,
    unless there are more threads than cores, which this one ensures while it runs."""

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
        except (OSError, AttributeError):  # another OpenMP, with its own waiting
            pass
        finally:
            there.set()
        self.stop.wait()

    def end(self) -> None:
        self.stop.set()
        self.thread.join()
