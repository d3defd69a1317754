"""Progress of long work, passed to a function that shows it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

OnProgress = Callable[[str, int, int | None], None]
"""Function `progress(stage, done, total)`, with None for an unknown `total`"""
Item = TypeVar("Item")
SOON = 1.0
"""Seconds of work before a progress line appears on a terminal"""


def silent(stage: str, done: int, total: int | None) -> None:
    """Does nothing: the `OnProgress` of callers that show no progress."""


_LISTENER: ContextVar[OnProgress] = ContextVar("_LISTENER", default=silent)


@contextmanager
def listened(listener: OnProgress) -> Iterator[None]:
    """Passes the progress of all work in the block to a function."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextmanager
def line_on_terminal() -> Iterator[None]:
    """Shows the progress of all work in the block as one line on standard error, after a second, if that is a terminal
    and no listener is set."""
    if _LISTENER.get() is not silent or not sys.stderr.isatty():
        yield
        return
    began, shown = time.monotonic(), False

    def show(stage: str, done: int, total: int | None) -> None:
        nonlocal shown
        if total and time.monotonic() - began >= SOON:
            shown = True
            print(f"\r\x1b[2K{stage}: {done / total:.0%}", end="", file=sys.stderr, flush=True)

    try:
        with listened(show):
            yield
    finally:
        if shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def tell(stage: str, done: int, total: int | None) -> None:
    """Passes the progress of one stage to the listener."""
    _LISTENER.get()(stage, done, total)


def counted(stage: str, items: Iterable[Item], total: int | None = None) -> Iterator[Item]:
    """Yields items, and reports after each the number done.

    >>> found = []
    >>> with listened(lambda *row: found.append(row)):
    ...     list(counted("reading", "ab", 2))
    ['a', 'b']
    >>> found
    [('reading', 0, 2), ('reading', 1, 2), ('reading', 2, 2)]
    """
    tell(stage, 0, total)
    for done, item in enumerate(items, 1):
        yield item
        tell(stage, done, total)
