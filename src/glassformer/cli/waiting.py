"""Line on a terminal that counts seconds until a verb prints something, so that no wait is silent."""

from __future__ import annotations

import sys
import threading
import time

SOON = 0.4
"""Seconds before the line appears."""
EVERY = 0.5
"""Seconds between updates of the line."""


class _Line:
    """Line on standard error with words and the seconds so far, written by a thread and erased at the end."""

    def __init__(self, words: str):
        self.words, self.done, self.shown = words, threading.Event(), False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        start, pause = time.monotonic(), SOON
        while not self.done.wait(pause):
            self.shown, pause = True, EVERY
            print(f"\r{self.words} ... {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        self.done.set()
        self.thread.join()
        if self.shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


_now: list[_Line] = []


def begin(words: str) -> None:
    """Shows `words` and the seconds so far from `SOON` seconds on until `end()`, if standard error is a terminal."""
    end()
    if sys.stderr.isatty():
        _now.append(_Line(words))


def end() -> None:
    """Erases the line that is shown, if any; must be called before other output."""
    while _now:
        _now.pop().end()
