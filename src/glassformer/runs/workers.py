"""Processes that train one run after another, so that work before a process's first step is done once for many runs.

A worker starts with the run that it is started for, or before the first run (`Pool.prepare`), and waits a while for
others. It is replaced after a run that failed or was stopped, so that no state of such a run reaches another one. This
module imports no torch, so that a verb can start workers before it imports torch itself.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from glassformer.runs.events import Notify

START = """
import gc, sys
if (root := sys.argv.pop(1)) not in sys.path:
    sys.path.insert(0, root)
gc.disable()  # what is imported stays
from glassformer.runs.arm import main
gc.freeze()
gc.enable()
sys.exit(main())
"""
"""Code of a worker: a run is trained by the code of its parent, from any place of import."""
FORKS = sys.platform == "linux"
"""True if a process may be copied after its imports; on others, libraries do not survive the copy."""
STOPPING = {signal.SIGINT, signal.SIGTERM}
"""Signals that ask a process to stop; a copy waits for its handlers before it takes one."""
OPEN = 1 << 12
"""Number above those of open files that a copied process closes."""
COMPLAINTS = "stderr.txt"
"""File in the folder of a run to which its worker's standard error goes."""
BEGUN, ENDED = "begun", "ended"
"""Lines that a worker prints before the first event of a run, and after the last one if it can train another run."""
LONGEST = 500
"""Maximum characters of the last line of a traceback in an error."""


class Copy:
    """Copy of this process that trains runs, with the methods of `subprocess.Popen` that a `Worker` calls.

    A copy imports nothing. The process must have done nothing but import, because a copy has a single thread, and all
    locks as they are."""

    returncode: int | None = None

    def __init__(self, main: Callable[[], int]) -> None:
        """Starts the copy, which ends with the exit status that `main` returns, the program of a worker."""
        self.waiting = threading.Lock()
        asked, told = os.pipe(), os.pipe()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # closed by a shell
                stream.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until the copy has set its handlers
        self.pid = os.fork()
        if self.pid == 0:
            _become(asked[0], told[1], main)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        for ours in (asked[0], told[1]):
            os.close(ours)
        self.stdin: IO[str] | None = os.fdopen(asked[1], "w", encoding="utf-8")
        self.stdout: IO[str] | None = os.fdopen(told[0], encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        if self.waiting.acquire(blocking=False):  # another thread may be in `wait`
            try:
                self._look(os.WNOHANG)
            finally:
                self.waiting.release()
        return self.returncode

    def wait(self) -> int:
        with self.waiting:
            self._look(0)
        assert self.returncode is not None
        return self.returncode

    def _look(self, how: int) -> None:
        """Sets the exit status if the process has ended; `how`: os.WNOHANG, or 0 to wait for its end."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, how)
            except ChildProcessError:  # the command ignores SIGCHLD, so that the system keeps no status
                pid, status = self.pid, 0
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended just now, as a thread in `wait` is about to say
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become(asked: int, told: int, main: Callable[[], int]) -> NoReturn:
    """Makes the present process, a copy, a worker that reads from and writes to these pipes."""
    status = 1
    try:
        os.setsid()  # Ctrl-C in a terminal reaches only the parent, which passes it on once
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for source, target in ((asked, 0), (told, 1), (nowhere, 2)):
            os.dup2(source, target)
        os.closerange(3, OPEN)  # also the pipes of other workers, which would not see their parent's end
        sys.stdout, sys.stderr = (os.fdopen(n, "w", 1, encoding="utf-8", errors="backslashreplace") for n in (1, 2))
        status = main()
    except KeyboardInterrupt:  # ends by the signal, which is how the parent knows that it was asked to stop
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)  # what the parent does at its end is not for a copy


class Worker:
    """Process that trains one run after another; its standard error goes to the folder of the present run."""

    process: subprocess.Popen[str] | Copy

    def __init__(
        self, environment: Mapping[str, str], place: Path | None = None, main: Callable[[], int] | None = None
    ):
        """Starts the process, for the run in the folder `place`, or for one that comes later; with `main`, the program
        of a worker, as a copy of this process."""
        if main is not None:
            self.made_of, self.process = (START, os.getcwd(), dict(environment)), Copy(main)
            return
        # -P: the current folder may hold a user's file with a module's name, such as random.py
        command = [sys.executable, "-P", "-c", START, str(Path(__file__).parents[2])]
        self.made_of = START, os.getcwd(), dict(environment)
        with (Path(os.devnull) if place is None else place / COMPLAINTS).open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # Ctrl-C in a terminal reaches only the parent, which passes it on once
            )

    def train(self, place: Path, notify: Notify) -> tuple[bool, str | None, int]:
        """Trains the run of a folder in the process, and sends its events to `notify`; returns (True if the run
        started, its last error or None, its exit status)."""
        from glassformer.runs.events import Error, decode  # imports torch

        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError):  # it has ended, as detected below
            self.process.stdin.write(json.dumps(str(place)) + "\n")
            self.process.stdin.flush()
        error, begun = None, False
        for line in self.process.stdout:
            begun = begun or line.strip() == BEGUN
            if line.strip() == ENDED:
                return True, error, 0
            if (event := decode(line)) is not None:
                error = event.error if isinstance(event, Error) else error
                notify(event)
        status = self.process.wait()
        if error is None and status > 0:
            error = last_line(place / COMPLAINTS)
        return begun, error, status

    def close(self) -> None:
        """Ends the worker process at once."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unwritten data are not read any more
                    pipe.close()


def last_line(complaints: Path) -> str | None:
    """Returns the last line that a process wrote to stderr, such as that of a traceback; None without any."""
    try:
        tail = complaints.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return None
    return tail[-1][:LONGEST] if tail else None


class Pool:
    """Pool of idle worker processes, which runs take from it and give back."""

    def __init__(self) -> None:
        self.idle: list[Worker] = []
        self.lock = threading.Lock()
        atexit.register(self.close)

    def prepare(self, workers: int, main: Callable[[], int] | None = None) -> None:
        """Starts idle workers until there are `workers` of them, so that they import while the caller does; with
        `main`, the program of a worker, as copies of the caller, which has imported it and done nothing else."""
        with self.lock:
            self.idle += [Worker(dict(os.environ), main=main) for _ in range(workers - len(self.idle))]

    def take(self, environment: Mapping[str, str]) -> Worker | None:
        """Returns an idle worker of this environment, or None; workers of other environments are ended."""
        with self.lock:
            kept, self.idle = self.idle, []
            alike = []
            for worker in kept:
                same = worker.made_of == (START, os.getcwd(), environment) and worker.process.poll() is None
                alike.append(worker) if same else worker.close()
            found = alike.pop() if alike else None
            self.idle = alike
        return found

    def give(self, worker: Worker) -> None:
        with self.lock:
            self.idle.append(worker)

    def close(self) -> None:
        with self.lock:
            for worker in self.idle:
                worker.close()
            self.idle = []


POOL = Pool()


class WorkerRun:
    """Run in a worker process of the pool: one thread calls `run`, and another one may call `stop`."""

    def __init__(self, place: Path, environment: Mapping[str, str] | None = None):
        """Sets up the run; `environment` is added to that of the process."""
        self.place, self.environment = place, environment or {}
        self.worker: Worker | None = None
        self.stopped = False

    def run(self, notify: Notify) -> tuple[str | None, int]:
        """Trains the run; returns (its last error, its exit status)."""
        environment = {**os.environ, **self.environment}
        while not self.stopped:
            idle = POOL.take(environment)
            self.worker = worker = idle or Worker(environment, self.place)
            if self.stopped:  # before there was a worker to stop
                self.stop()
            begun, error, status = worker.train(self.place, notify)
            if worker.process.poll() is None and not self.stopped:
                POOL.give(worker)
            else:
                worker.close()
            if begun or idle is None:  # an idle worker may have ended just before
                return error, status
        return None, -signal.SIGINT

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Sends the worker process a signal: SIGINT asks the run to save itself and end, SIGKILL ends it at once."""
        self.stopped = True
        if self.worker is not None and self.worker.process.poll() is None:
            self.worker.process.send_signal(number)
