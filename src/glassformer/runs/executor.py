"""Executors, which train requested runs, and `kept`, which finds those that are finished."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from glassformer import machine
from glassformer.dynamics.summary import summary_of
from glassformer.errors import RequestError
from glassformer.files import disk_errors
from glassformer.machine import available_cores
from glassformer.parts.core.base import to_plain
from glassformer.runs.arm import STOPPED, train_one
from glassformer.runs.events import End, Error, Event, Kept, Notify, Start, silent
from glassformer.runs.files import RESULT, read_result
from glassformer.runs.request import RUN, RunRequest
from glassformer.runs.results import Dynamics, Key, RunResult
from glassformer.runs.workers import WorkerRun
from glassformer.training import Callback, Interrupted
from glassformer.training.callbacks.base import check_callbacks

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Executor(Protocol):
    """Interface of an executor, which decides the place and the order of training."""

    @property
    def workers(self) -> int | None:
        """Maximum number of runs in parallel on one machine; None if a comparison chooses it (`arms.at_once`)."""

    shared: bool
    """True if runs in parallel share a device, so that their speeds do not compare."""
    here: bool
    """True if this machine trains the runs."""

    def run(self, requests: Sequence[RunRequest], folder: Path, notify: Notify = silent) -> Iterator[RunResult]:
        """Trains every request, in `request.place(folder)`, resuming if it was stopped; yields a result for each as it
        ends, in any order. A run that fails has a result with `status="failed"`.

        Raises Interrupted or KeyboardInterrupt if it was stopped: started runs resume when they are requested again.
        """


def kept(requests: Iterable[RunRequest], folder: Path, notify: Notify = silent) -> dict[Key, RunResult]:
    """Returns {key: result} of the requests that an earlier run in `folder` has trained to its end, or until it
    diverged; sends `Kept` for each."""
    found = {}
    for request in requests:
        if (result := finished(request, folder)) is not None:
            found[request.key] = result
            notify(Kept(name=request.name, seed=request.seed))
    return found


def execute(
    requests: Sequence[RunRequest], folder: Path, executor: Executor | None = None, notify: Notify = silent
) -> Iterator[RunResult]:
    """Yields a result for every request: first the kept ones, then the others as `executor` ends them.

    The caller holds the folder (`files.only_writer`), and `interruptible()` if SIGTERM should save the present run."""
    held = kept(requests, folder, notify)
    yield from held.values()
    yield from (executor or Local()).run([one for one in requests if one.key not in held], folder, notify)


def finished(request: RunRequest, folder: Path) -> RunResult | None:
    """Returns the complete result of a request that was trained in `folder` before; None without one."""
    result = read_result(request.place(folder))
    return result if result is not None and request.answered_by(result) else None


class Local:
    """Executor of runs in processes of this machine, `workers` of them in parallel.

    One worker, which has all cores, makes speeds comparable. Several, with a share of the cores each, train more small
    runs in an hour; their speeds depend on each other, and are not judged. With None, a comparison has several for
    small models on a CPU."""

    here = True

    def __init__(self, workers: int | None = 1):
        """Raises RequestError for more workers than this process has cores."""
        cores = available_cores()
        if workers is not None and not 1 <= workers <= cores:
            message = f"workers={workers}: the number must be from 1 to {cores}, the cores that this process may use"
            raise RequestError(message, code="range", field="workers", value=workers, expected=f"1 to {cores}")
        self.workers, self.shared = workers, workers is not None and workers > 1

    def run(self, requests: Sequence[RunRequest], folder: Path, notify: Notify = silent) -> Iterator[RunResult]:
        waiting = deque(requests)
        at_work: dict[Key, WorkerRun] = {}
        news: SimpleQueue[_News] = SimpleQueue()

        def begin() -> None:
            while waiting and len(at_work) < (self.workers or 1):
                request = waiting.popleft()
                notify(Start(name=request.name, seed=request.seed))
                place = laid(request, folder, self.shared and len(requests) > 1)
                at_work[request.key] = self._begin(request, place, news)

        try:
            begin()
            while at_work:
                told = news.get()
                if not isinstance(told, _Ended):
                    notify(told)
                    continue
                del at_work[told.request.key]
                result = self._result(told, folder)
                notify(End(name=result.name, seed=result.seed, result=result))
                try:
                    begin()  # before the caller works with the result
                except BaseException:
                    yield result
                    raise
                yield result
        except KeyboardInterrupt:
            if not at_work:
                raise
            _stop(at_work, news)
            raise Interrupted("stopped", code="stopped") from None
        finally:
            _stop(at_work, news)

    def _begin(self, request: RunRequest, place: Path, news: SimpleQueue[_News]) -> WorkerRun:
        training = self.training(place)

        def work() -> None:
            try:
                news.put(_Ended(request, *training.run(news.put)))
            except BaseException as error:  # passed to the thread that waits for the run
                news.put(_Ended(request, None, 0, error))

        threading.Thread(target=work, daemon=True).start()
        return training

    def training(self, place: Path) -> WorkerRun:
        """Returns the object that trains the run in the folder `place` by a worker process."""
        return WorkerRun(place)

    def _result(self, ended: _Ended, folder: Path) -> RunResult:
        if ended.raised is not None:
            raise ended.raised
        request, place = ended.request, ended.request.place(folder)
        result = finished(request, folder)
        if result is not None:
            return result
        if ended.status in (-signal.SIGINT, -signal.SIGTERM):
            raise KeyboardInterrupt
        error = ended.error
        if ended.status == 0:
            error = f"{place / RESULT} is not what a trained arm leaves"
        return failed(request, place, error or ending(ended.status))


class InProcess:
    """Executor of runs in this process, one after the other, so that callbacks receive each of them. Its speeds are
    those of a process that also does other work."""

    here = True

    def __init__(self, callbacks: Sequence[Callback] = ()):
        """Raises RequestError for a value that is not a callback."""
        check_callbacks(callbacks)
        self.callbacks = callbacks
        self.workers, self.shared = 1, False

    def run(self, requests: Sequence[RunRequest], folder: Path, notify: Notify = silent) -> Iterator[RunResult]:
        for request in requests:
            notify(Start(name=request.name, seed=request.seed))
            told: list[str] = []

            def tell(event: Event, told: list[str] = told) -> None:
                told.extend([event.error] if isinstance(event, Error) else [])
                notify(event)

            place = laid(request, folder)
            status = train_one(place, tell, self.callbacks)
            if status == STOPPED:
                raise Interrupted("stopped", code="stopped")
            result = finished(request, folder) or failed(request, place, told[-1] if told else ending(status))
            notify(End(name=result.name, seed=result.seed, result=result))
            yield result


def with_workers(executor: Executor, workers: int) -> Executor:
    """Returns an executor of the same kind with a given number of workers."""
    found: Any = copy(executor)
    found.workers, found.shared = workers, workers > 1
    return found


def trains_here(executor: Executor | None) -> bool:
    """Returns True if runs are trained on this machine, as they are without an executor."""
    return executor is None or executor.here


def with_callbacks(executor: Executor | None, callbacks: Sequence[Callback]) -> Executor | None:
    """Returns the executor that calls the callbacks of a verb; without callbacks, the given one. Raises RequestError
    for an executor that trains in other processes, which callbacks do not reach."""
    if not callbacks:
        return executor
    if executor is not None:
        kind = type(executor).__name__
        raise RequestError(
            f"callbacks are called in this process, and executor={kind} trains runs in others; leave the executor out",
            code="conflict", field="callbacks", value=kind, expected="no executor",
        )  # fmt: skip
    return InProcess(callbacks)


class Slots(Local):
    """Executor like `Local` with one run at a time on each of `devices`, such as cuda:0 and cuda:1. A device that is
    named twice has two runs, whose speeds are then not judged.

    Raises RequestError for a device that this machine lacks, and if runs request another one (`device`)."""

    def __init__(self, devices: Sequence[str], device: str = "auto"):
        if not devices:
            raise RequestError(code="missing", field="slots", value="", expected="devices such as cuda:0,cuda:1")
        named = [_device(name) for name in devices]
        super().__init__(len(named))
        self.shared = max(Counter(named).values()) > 1
        self.free = deque(named)
        if wrong := [one for one in named if device not in ("auto", one.split(":")[0])]:
            raise RequestError(
                f"device={device} and slots={','.join(named)} do not go together; leave the device out",
                code="conflict", field="device", value=device, expected=f"auto or {wrong[0].split(':')[0]}",
            )  # fmt: skip

    def training(self, place: Path) -> WorkerRun:
        return _OnDevice(place, self.free)


class _OnDevice(WorkerRun):
    """Run in a worker process on a device taken from `free`, which gets it back after the run."""

    def __init__(self, place: Path, free: deque[str]):
        self.device, self.free = free.popleft(), free
        super().__init__(place, {VISIBLE: _visible(self.device)})

    def run(self, notify: Notify) -> tuple[str | None, int]:
        try:
            return super().run(notify)
        finally:
            self.free.append(self.device)


def _device(name: str) -> str:
    """Returns the device of a slot by its name: `cpu`, or a GPU with its number, `cuda:0` for `cuda`. Raises
    RequestError."""
    named = machine.device_named(name)
    if named != "cpu" and not named.startswith("cuda"):
        raise RequestError(f"slots={name}: use cpu, or cuda:0 and so on", field="slots", value=name, code="unknown")
    return "cuda:0" if named == "cuda" else named


def _visible(device: str) -> str:
    """Returns the value of CUDA_VISIBLE_DEVICES for the process of a run."""
    if device == "cpu":
        return ""
    seen = [one for one in os.environ.get(VISIBLE, "").split(",") if one]
    number = int(device.split(":")[1])
    return seen[number] if number < len(seen) else str(number)


@dataclass(frozen=True)
class _Ended:
    request: RunRequest
    error: str | None
    status: int
    raised: BaseException | None = None


_News = Event | _Ended


def _stop(at_work: dict[Key, WorkerRun], news: SimpleQueue[_News]) -> None:
    """Stops the running runs, so that they save themselves, and waits for them; a second Ctrl-C does not wait."""
    try:
        for training in at_work.values():
            training.stop()
        while at_work:
            told = news.get()
            if isinstance(told, _Ended):
                del at_work[told.request.key]
    finally:
        for training in at_work.values():
            training.stop(signal.SIGKILL)
        at_work.clear()


def laid(request: RunRequest, folder: Path, shared: bool = False) -> Path:
    """Creates the folder of a run with its request.json; returns the folder."""
    place = request.place(folder)
    with disk_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        request.write(place, shared)
    return place


def failed(request: RunRequest, place: Path, error: str) -> RunResult:
    return RunResult(
        name=request.name,
        seed=request.seed,
        parameters=request.config.num_params(),
        config=request.config.to_dict(),
        recipe=to_plain(request.recipe),
        dynamics=Dynamics.of(summary_of(place / RUN)),
        sources=request.sources,
        status="failed",
        error=error,
    )


def ending(status: int) -> str:
    return f"the process ended with status {status}" + (" (out of memory?)" if status == -signal.SIGKILL else "")


@contextmanager
def interruptible() -> Iterator[None]:
    """Makes SIGTERM stop runs as Ctrl-C does, so that the present one is saved; also SIGINT if the shell ignored it, as
    for background jobs."""
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
