"""How many threads a piece of work takes, and how they wait for each other, found while it runs.

Threads that share a product wait for the last of them at its end. While something else has one of their cores, each of
hundreds of products waits for it, and the one that waits keeps its core busy. So every kind of work (a decoding step, a
piece of a prompt, a training step) has a `Pace` over its ways, from the humblest to the one that asks most of the
machine:

    work whose bits are the same with any number of threads     1, 2, 4, ..., n - 1, n threads
    all other work                                              n threads that sleep while they wait, n that do not

A pace begins with the way that served this kind of work on this processor in earlier processes (`kept.py`), else with
the last, and is told how long the units of its work took:

    a humbler way   is taken when others have the cores that this one counts on; and tried, for nobody may tell, once at
                    the beginning, where units are short (some seconds later where it is known), and when they take
                    `SLOWER` times as long as they did
    a further one   is tried when others leave it the cores; one that was left because of them is taken again at once
    a try           stays where units take less than `FASTER` (`FURTHER`) of what they took before

Each try doubles the time to the next, and peace makes it short again. What torch is set to is the most that is taken,
and it is set to it again afterwards; a number that was asked for is never touched (`fix`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from glassformer.threads import kept
from glassformer.threads.crowd import Crowd
from glassformer.threads.others import Others
from glassformer.threads.pace import Pace, ways


class Loading:
    """Whose work loading is: there is no model yet."""


LOADING = Loading()
_others = Others()
_crowd: Crowd | None = None
_fixed = bool(os.environ.get("OMP_NUM_THREADS"))
_paces: WeakKeyDictionary[Any, dict[Hashable, Pace]] = WeakKeyDictionary()
_sizes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


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
        said, open_to = f"{kind} on 2^{_size(owner)} bytes", ways(most, free)
        paces[key] = Pace(open_to, _cores(), gains=kept.gains(said, open_to), keep=partial(kept.keep, said, open_to))
    return paces[key]


def _size(owner: Any) -> int:
    """log2 of the bytes of a model, or of the one that `owner` has; 0 of anything else."""
    if owner not in _sizes:
        model = getattr(owner, "model", owner)
        tensors = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
        _sizes[owner] = sum(tensor.nbytes for tensor in tensors).bit_length()
    return _sizes[owner]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def paced(owner: Any, kind: Hashable, size: float = 1.0, free: bool = True, apart: bool = False) -> Iterator[None]:
    """Inside, a unit of work of this kind, of this size (tokens, bytes), goes the way that it does best with. `free`:
    its bits are the same with any number of threads. Units inside others are not counted, but those that are `apart`:
    they go their own way, and the time of the unit around them is without theirs."""
    # Whoever compiles what runs inside would have all of this in the graph.
    inside = _busy.unit
    mine = None if torch.compiler.is_compiling() or (inside and not apart) or _busy.held else pace(owner, kind, free)
    if mine is None:
        yield
        return
    _busy.unit = True
    mine.prepare(_others(), time.perf_counter())
    way, before, slept = mine.way, torch.get_num_threads(), _crowd is not None
    sleeping(way.sleep)
    if way.threads != before:
        torch.set_num_threads(way.threads)
    began, earlier = time.perf_counter(), _busy.seconds
    try:
        yield
    finally:
        ended = time.perf_counter()
        if way.threads != before:
            torch.set_num_threads(before)
        if inside:
            sleeping(slept)
        _busy.unit = inside
        took = ended - began - (_busy.seconds - earlier)
        _busy.seconds = earlier + ended - began
    if took > Others.LEAST:
        _others(worked=True)
    mine.took(took, ended, _others, size)


class Beat:
    """Units of which only the ends are told: each is the time since the one before, without units of other kinds."""

    def __init__(self, kind: Hashable):
        self.kind = kind
        self.began: tuple[float, float] | None = None

    def __call__(self, owner: Any) -> None:
        """A unit of work on `owner` ends, and another begins."""
        mine = None if _busy.unit or _busy.held else pace(owner, self.kind, free=False)
        if mine is None:
            self.began = None
            return
        now = time.perf_counter()
        if self.began is not None:
            took = now - self.began[0] - (_busy.seconds - self.began[1])
            if took > Others.LEAST:
                _others(worked=True)
            mine.took(took, now, _others)
        mine.prepare(_others(), now)
        sleeping(mine.way.sleep)
        self.began = time.perf_counter(), _busy.seconds


@contextmanager
def at_most(count: int) -> Iterator[None]:
    """Inside, torch takes so many threads, or fewer where it is set to fewer, and nothing is chosen."""
    before, held = torch.get_num_threads(), _busy.held
    torch.set_num_threads(min(count, before))
    _busy.held = True
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _busy.held = held


class _Busy(threading.local):
    unit = False
    """Inside a unit."""
    held = False
    """Inside `at_most`."""
    seconds = 0.0
    """Of units that have ended."""


_busy = _Busy()


def sleeping(wanted: bool) -> None:
    """Whether threads sleep while they wait, from now on."""
    global _crowd
    if wanted and _crowd is None:
        _crowd = Crowd()
    elif not wanted and _crowd is not None:
        _crowd.end()
        _crowd = None
