"""`glassformer` and `python -m glassformer`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress


def _leave(status: list[int]) -> None:
    """Ends the process without the interpreter's clean-up, which takes a second once torch is loaded."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the reader has exited, or the stream was closed
            stream.flush()
    os._exit(status[0])


def run() -> None:
    """Runs the command line as the main function of a process."""
    status = [1]
    atexit.register(_leave, status)  # the first to register is the last to run
    try:
        entry()
    except SystemExit as end:
        status[0] = end.code if isinstance(end.code, int) else 1
        raise


def entry() -> None:
    """Runs the command line; exits with what `glassformer.cli.main` returns."""
    try:
        from glassformer.cli import main  # takes some tenths of a second, within which Ctrl-C may be pressed

        status = main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        status = 128 + signal.SIGINT
    sys.exit(status)


if __name__ == "__main__":
    run()
