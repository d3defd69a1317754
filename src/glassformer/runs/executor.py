"""Executors train the runs that are asked for; `kept` finds those that need not be trained."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import glassformer
from glassformer.dynamics.summary import summary_of
from glassformer.parts.base import to_plain
from glassformer.runs.events import End, Error, Kept, Notify, Start, decode, silent
from glassformer.runs.files import RESULT, read_result
from glassformer.runs.request import RUN, RunRequest
from glassformer.runs.results import Dynamics, Key, RunResult
from glassformer.training import Interrupted
from glassformer.training.checkpoint import disk_errors

START = """
import sys
if (root := sys.argv.pop(1)) not in sys.path:
    sys.path.insert(0, root)
from glassformer.runs.arm import main
sys.exit(main())
"""
"""A run is trained by the code that its parent runs, wherever that was imported from."""
LONGEST = 500
"""Characters of the last line of a traceback that become an error."""


class Executor(Protocol):
    """Where and in which order runs are trained."""

    def run(self, requests: Sequence[RunRequest], folder: Path, notify: Notify = silent) -> Iterator[RunResult]:
        """Trains every request, in `request.place(folder)`, from where it stopped; yields a result for each as it
        ends, in any order. A run that fails is a result with `status="failed"`.

        Raises Interrupted or KeyboardInterrupt where it was stopped: what has begun goes on when it is asked for again.
        """


def kept(requests: Iterable[RunRequest], folder: Path, notify: Notify = silent) -> dict[Key, RunResult]:
    """Results of the requests that were trained to their end before, or diverged."""
    found = {}
    for request in requests:
        if (result := finished(request, folder)) is not None:
            found[request.key] = result
            notify(Kept(name=request.name, seed=request.seed))
    return found


def execute(
    requests: Sequence[RunRequest], folder: Path, executor: Executor | None = None, notify: Notify = silent
) -> Iterator[RunResult]:
    """A result for every request: first those that are kept, then the others as `executor` ends them.

    The caller holds the folder (`training.folder.only_writer`), and `interruptible()` if SIGTERM should save the run at
    work."""
    held = kept(requests, folder, notify)
    yield from held.values()
    yield from (executor or Serial()).run([one for one in requests if one.key not in held], folder, notify)


def finished(request: RunRequest, folder: Path) -> RunResult | None:
    """The result that this request has left, with config and recipe as they are written today; None where there is
    none."""
    result = read_result(request.place(folder))
    if result is None or not request.answered_by(result):
        return None
    return result.changed(config=request.config.to_dict(), recipe=to_plain(request.recipe))


class Serial:
    """One run after the other, each with all cores, so that speeds are comparable; each in a process of its own, so
    that one that fails leaves the others alone."""

    def run(self, requests: Sequence[RunRequest], folder: Path, notify: Notify = silent) -> Iterator[RunResult]:
        for request in requests:
            notify(Start(name=request.name, seed=request.seed))
            result = self._one(request, folder, notify)
            notify(End(name=request.name, seed=request.seed, result=result))
            yield result

    def _one(self, request: RunRequest, folder: Path, notify: Notify) -> RunResult:
        place = request.place(folder)
        with disk_errors(place):
            place.mkdir(parents=True, exist_ok=True)
            request.write(place)
        error, status = self.spawn(place, notify)
        result = finished(request, folder)
        if result is not None:
            return result
        if status in (-signal.SIGINT, -signal.SIGTERM):
            raise KeyboardInterrupt
        if status == 0:
            error = f"{place / RESULT} is not what a trained arm leaves"
        return _failed(request, place, error or _ended(status))

    def spawn(self, place: Path, notify: Notify) -> tuple[str | None, int]:
        """Trains the run of a folder in a process; (its last error, its exit status).

        The session of the process is its own, so that Ctrl-C in a terminal reaches this process alone: it is passed
        on once, and the run is saved."""
        # -P: the folder one happens to be in holds the user's files, and one may be called as a module is, random.py.
        command = [sys.executable, "-P", "-c", START, str(Path(glassformer.__file__).parents[1]), str(place)]
        complaints = place / "stderr.txt"
        with complaints.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
            error, stopped = _followed(process, notify)
        if stopped:
            raise Interrupted("stopped")
        if error is None and process.returncode > 0:
            tail = complaints.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            error = tail[-1][:LONGEST] if tail else None
        return error, process.returncode


def _followed(process: subprocess.Popen[str], notify: Notify) -> tuple[str | None, bool]:
    """Passes on the events of a process until it ends; (its last error, whether Ctrl-C stopped it)."""
    assert process.stdout is not None
    error, stopped = None, False
    try:
        while True:
            try:
                for line in process.stdout:
                    if (event := decode(line)) is not None:
                        error = event.error if isinstance(event, Error) else error
                        notify(event)
                process.wait()
                return error, stopped
            except KeyboardInterrupt:
                if stopped:  # a second one does not wait
                    raise
                stopped = True
                process.send_signal(signal.SIGINT)
    finally:
        if process.poll() is None:
            process.kill()


def _failed(request: RunRequest, place: Path, error: str) -> RunResult:
    return RunResult(
        name=request.name,
        seed=request.seed,
        parameters=request.config.num_params(),
        config=request.config.to_dict(),
        recipe=to_plain(request.recipe),
        dynamics=Dynamics.of(summary_of(place / RUN)),
        status="failed",
        error=error,
    )


def _ended(status: int) -> str:
    return f"the process ended with status {status}" + (" (out of memory?)" if status == -signal.SIGKILL else "")


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM stops runs as Ctrl-C does, so that the one at work is saved; SIGINT too where the shell had it ignored,
    as it does for what runs in the background."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
