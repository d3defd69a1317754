"""How threads wait for each other."""

from __future__ import annotations

import ctypes
import os
import threading


class Crowd:
    """Makes the threads of GNU's OpenMP sleep where they wait. They turn round for some milliseconds first, unless
    there are more of them than cores: so while this runs there are, in a thread that does nothing."""

    def __init__(self) -> None:
        self.stop, there = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._stand, args=(there,), daemon=True)
        self.thread.start()
        there.wait()

    def _stand(self, there: threading.Event) -> None:
        try:
            openmp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD)  # torch's own
            nothing = ctypes.cast(openmp.omp_in_parallel, ctypes.c_void_p)
            openmp.GOMP_parallel(nothing, None, ctypes.c_uint(max(2, os.cpu_count() or 1)), ctypes.c_uint(0))
        except (OSError, AttributeError):  # another OpenMP, which waits as it does
            pass
        finally:
            there.set()
        self.stop.wait()

    def end(self) -> None:
        self.stop.set()
        self.thread.join()
