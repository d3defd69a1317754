"""Time at which the command line started, and the exception that SIGTERM raises."""

import time

STARTED = time.perf_counter()
"""`time.perf_counter` at the import of the program, before torch is imported."""


class Terminated(KeyboardInterrupt):
    """Exception that SIGTERM raises: it ends a command even if Ctrl-C would end only a part, such as one answer."""
