"""Time at which the command line started, and the signal that asks it to end."""

import time

STARTED = time.perf_counter()
"""Reading of the clock when the program was imported, before anything heavy."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends a command as Ctrl-C does, even if Ctrl-C would end only a part, such as one answer."""
