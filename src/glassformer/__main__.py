"""`glassformer` and `python -m glassformer`."""

from __future__ import annotations

import signal
import sys


def entry() -> None:
    """Runs the command line; exits with what `glassformer.cli.main` returns."""
    try:
        from glassformer.cli import main  # some tenths of a second, in which somebody may press Ctrl-C

        status = main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        status = 128 + signal.SIGINT
    sys.exit(status)


if __name__ == "__main__":
    entry()
