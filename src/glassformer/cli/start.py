"""Time at which the command line started."""

import time

STARTED = time.perf_counter()
"""Reading of the clock when the program was imported, before anything heavy."""
