"""Time at which the command line started, and the signal that asks it to end."""

import time

STARTED = time.perf_counter()
"""Reading of the clock when the program was imported, before anything heavy."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does, also where Ctrl-C only ends a part of it."""
