"""Facts that hold for the code a thread runs now: who looks and who edits, how regions run, what ranks add up.

They are one frozen value, replaced by whoever enters a `with`. Each thread has its own, so that two threads may look
into one model at once, and what one enters neither slows nor changes the other. A `threading.local` and no
`ContextVar` holds it: `torch.compile` reads and guards the first, and cannot trace the second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Look = Callable[[Tensor, int, int], None]
"""look(x, first, total): x holds rows first, first + 1, ... of `total` along the axis s; most sites show all at
once."""

Edit = Callable[[Tensor], Tensor]
"""edit(x) -> the value that takes the place of x."""


@dataclass(frozen=True)
class Tap:
    """Functions that a site calls with what passes it, in this order."""

    edits: tuple[Edit, ...] = ()
    looks: tuple[Look, ...] = ()


class Eagerly:
    """A stretch in which all runs as it is written: the number of contexts that are open in it, and the warnings given
    in it."""

    def __init__(self) -> None:
        self.open = 0
        self.warned: set[str] = set()

    def first(self, what: str) -> bool:
        """Returns True in the first call for `what`."""
        new = what not in self.warned
        self.warned.add(what)
        return new


@dataclass(frozen=True, eq=False)
class Running:
    """The facts of one thread; those of a thread that has entered nothing are the defaults."""

    taps: Mapping[Any, Tap] | None = None
    """Functions that sites call (`parts/core/site.py`); None: there are none."""
    compiles: bool = False
    """True if regions are compiled (`parts/region.py`)."""
    eagerly: Eagerly | None = None
    """Set while a model is looked at or edited: nothing runs compiled, whatever `compiles` says."""
    reduce: Callable[[Tensor], Tensor] | None = None
    """The sum over the processes that share a batch (`parts/core/reduce.py`); None: there is one process."""


NOTHING = Running()
KEY = "glassformer.running"


class _Thread(threading.local):
    """The value of this thread, `now`, and the losses that arise in the passes it runs, the innermost last
    (`parts/core/auxiliary.py`)."""

    now: Running

    def __init__(self) -> None:
        self.added: list[list[Tensor]] = []
        if ordinary():
            self.now = NOTHING

    def __getattr__(self, name: str) -> Running:
        """`now` in one of autograd's own threads: that of the thread which called `backward`, whose values torch
        brings along."""
        if name != "now":
            raise AttributeError(name)
        found = torch._C._get_obj_in_tls(KEY) if torch._C._is_key_in_tls(KEY) else None
        return NOTHING if found is None else found


def ordinary() -> bool:
    """Returns True if Python started this thread. Autograd starts others, one for each device."""
    return not isinstance(threading.current_thread(), threading._DummyThread)


thread = _Thread()


def put(now: Running) -> None:
    """Makes `now` the value of this thread, and of the backward passes that it calls."""
    if ordinary():
        thread.now = now
    if now.taps is None and not now.compiles and now.eagerly is None and now.reduce is None:
        _forget()
    else:
        torch._C._stash_obj_in_tls(KEY, now)


def _forget() -> None:
    """A thread that ends with something kept there waits forever for Python; torch before 2.13 cannot remove it."""
    if hasattr(torch._C, "_remove_obj_from_tls"):
        torch._C._remove_obj_from_tls(KEY)
    else:
        torch._C._stash_obj_in_tls(KEY, None)


@contextmanager
def running(**changes: Any) -> Iterator[None]:
    """Inside, in this thread, these fields have these values."""
    before = {name: getattr(thread.now, name) for name in changes}
    put(replace(thread.now, **changes))
    try:
        yield
    finally:
        put(replace(thread.now, **before))
