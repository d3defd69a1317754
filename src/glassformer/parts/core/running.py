"""State of the code that a thread runs now: observers and edits, compilation of regions, sums over ranks.

It is one frozen value, replaced while a `with` block runs. Each thread has a separate one, so that two threads may
observe one model at once without slowing or changing each other. A `threading.local` holds it, not a `ContextVar`,
because `torch.compile` reads and guards only the first.
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
"""Function look(x, first, total) that observes a value: x holds rows first, first + 1, ... of `total` rows along the
axis s (tokens); most sites show all rows at once."""

Edit = Callable[[Tensor], Tensor]
"""Function edit(x) that changes a value: returns the tensor that replaces x."""


@dataclass(frozen=True)
class Tap:
    """Functions that one site calls with each value that passes it: first the edits, then the looks (observers)."""

    edits: tuple[Edit, ...] = ()
    looks: tuple[Look, ...] = ()


class Eagerly:
    """State of the contexts in which nothing is compiled, because a model is observed or edited: the number of open
    contexts, and the warnings already given."""

    def __init__(self) -> None:
        self.open = 0
        self.warned: set[str] = set()

    def first(self, what: str) -> bool:
        """Returns True only in the first call with this text `what`, so that each warning is given once."""
        new = what not in self.warned
        self.warned.add(what)
        return new


@dataclass(frozen=True, eq=False)
class Running:
    """State of the code that one thread runs; the defaults are the state outside any context."""

    taps: Mapping[Any, Tap] | None = None
    """Mapping from each site to the functions that it calls (`parts/core/site.py`); None if no site calls any."""
    compiles: bool = False
    """True if regions (elementwise functions) are compiled (`parts/region.py`)."""
    eagerly: Eagerly | None = None
    """State of the contexts in which nothing is compiled, whatever `compiles` is, because a model is observed or
    edited; None outside such contexts."""
    reduce: Callable[[Tensor], Tensor] | None = None
    """Function that sums over the processes that share a batch (`parts/core/reduce.py`); None for one process."""


NOTHING = Running()
KEY = "glassformer.running"


class _Thread(threading.local):
    """State of each thread: `now`, and `added`, the lists of auxiliary losses of its open contexts, the innermost last
    (`parts/core/auxiliary.py`)."""

    now: Running

    def __init__(self) -> None:
        self.added: list[list[Tensor]] = []
        if ordinary():
            self.now = NOTHING

    def __getattr__(self, name: str) -> Running:
        """Returns the value of `now` in a thread that autograd started: the state of the thread that called `backward`,
        which torch copies."""
        if name != "now":
            raise AttributeError(name)
        found = torch._C._get_obj_in_tls(KEY) if torch._C._is_key_in_tls(KEY) else None
        return NOTHING if found is None else found


def ordinary() -> bool:
    """Returns True if Python started the current thread; False in those that autograd starts, one for each device."""
    return not isinstance(threading.current_thread(), threading._DummyThread)


thread = _Thread()


def put(now: Running) -> None:
    """Makes `now` the state of this thread, and of the backward passes that it starts."""
    if ordinary():
        thread.now = now
    if now.taps is None and not now.compiles and now.eagerly is None and now.reduce is None:
        _forget()
    else:
        torch._C._stash_obj_in_tls(KEY, now)


def _forget() -> None:
    """Removes the state that `put` stored in torch's thread-local storage, because a thread that ends with one waits
    forever for Python. torch before 2.13 cannot remove it, and stores None."""
    if hasattr(torch._C, "_remove_obj_from_tls"):
        torch._C._remove_obj_from_tls(KEY)
    else:
        torch._C._stash_obj_in_tls(KEY, None)


@contextmanager
def running(**changes: Any) -> Iterator[None]:
    """Context manager that sets these fields of the current thread's `Running` inside the context."""
    before = {name: getattr(thread.now, name) for name in changes}
    put(replace(thread.now, **changes))
    try:
        yield
    finally:
        put(replace(thread.now, **before))
