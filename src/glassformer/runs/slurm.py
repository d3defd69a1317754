"""Runs as jobs of a SLURM cluster: one array, submitted by submitit (the extra `slurm`).

The folder on the shared disk decides, never the scheduler. A job that is preempted or out of time saves its run and is
queued again; one that disappears without a result is submitted again, like a dead worker's. The submitting process may
end: the jobs continue, and the same command finds them by jobs.json, or by their files.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from glassformer import machine
from glassformer.errors import RequestError
from glassformer.files import OwnerWatch, replace_text
from glassformer.runs.arm import STOPPED
from glassformer.runs.events import End, Error, Event, Notify, StageEvent, Start, Step, decode, encode, silent
from glassformer.runs.executor import Executor, Local, Slots, ending, failed, finished, laid
from glassformer.runs.files import RESULT
from glassformer.runs.request import REQUEST, RunRequest, read_request
from glassformer.runs.results import RunResult
from glassformer.runs.workers import COMPLAINTS, LONGEST, WorkerRun, last_line

JOBS, LOGS = "jobs.json", "jobs"
EVENTS, OUTCOME = "events.jsonl", "outcome.json"
LIVES = 3
"""Maximum number of times that a run is submitted again because its worker died."""
BETWEEN_STEPS = 5.0
"""Minimum seconds between two events `step` that a job writes down."""
BETWEEN_LOOKS, BETWEEN_QUESTIONS = 2.0, 10.0
"""Seconds between two reads of the folders, and between two queries of the queue."""
SURE = 2
"""Consecutive queries after which a missing job counts as gone, because its files may appear late on a shared disk."""
SAVING = 60.0
"""Seconds that a run has to save itself; submitit asks 90 seconds before the end."""
LONGEST_ARRAY = 1000
"""Maximum number of jobs in one array; SLURM accepts one more by default."""
MINUTES = 60
"""Default minutes of a job, which is queued again until its run is done."""
TIMES_OUT = 10_000
GONE = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
        "PREEMPTED", "REVOKED", "TIMEOUT",
    }
)  # fmt: skip
"""States of a job that will not continue; one that is queued again has another state by the next query."""


class Queue(Protocol):
    """Interface of a queue of jobs."""

    def submit(self, arms: Sequence[SlurmRun], folder: Path) -> list[str]:
        """Submits a job for each run; returns the names of the jobs. Logs may be written to `folder`."""

    def states(self, names: Sequence[str]) -> dict[str, str]:
        """Returns {name: state by SLURM} of these jobs; a job that will not continue has a state of GONE, or no
        entry."""


@dataclass
class SlurmRun:
    """Function that a job calls: it trains the run of a folder in a separate process."""

    place: str
    name: str
    seed: int
    training: WorkerRun | None = field(default=None, init=False, repr=False, compare=False)
    thread: threading.Thread | None = field(default=None, init=False, repr=False, compare=False)

    def __call__(self) -> int:
        """Trains the run; returns its exit status, which it also writes to outcome.json. Raises SystemExit if the run
        was stopped, so that the job does not count as done."""
        place, statuses = Path(self.place), list[int]()
        (place / OUTCOME).unlink(missing_ok=True)
        if shares_processor():
            replace_text(place / REQUEST, json.dumps({**read_request(place), "shared": True}))
        training = self.training = WorkerRun(place)

        def work() -> None:
            # only submitit handles the signal of the job's end: a process inherits the blocked signals
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
            with (place / EVENTS).open("w", encoding="utf-8") as file:
                _, status = training.run(_writer(file))
                statuses.append(status)

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()
        try:
            while self.thread.is_alive():
                time.sleep(0.2)
        finally:  # a signal's handler leaves by SystemExit
            if self.thread.is_alive():
                training.stop(signal.SIGKILL)
        if training.stopped or not statuses or statuses[0] == STOPPED:
            raise SystemExit(STOPPED)
        replace_text(place / OUTCOME, json.dumps({"status": statuses[0]}))
        return statuses[0]

    def checkpoint(self) -> Any:
        """Saves the run when the job is preempted or out of time, and returns its continuation; called by submitit."""
        if self.training is not None and self.thread is not None:
            self.training.stop()
            until = time.monotonic() + SAVING
            while self.thread.is_alive() and time.monotonic() < until:
                time.sleep(0.1)
        return importlib.import_module("submitit").helpers.DelayedSubmission(SlurmRun(self.place, self.name, self.seed))


def shares_processor() -> bool:
    """Returns True if this job trains without a GPU on only some of the machine's cores, next to other jobs."""
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "") not in ("", "NoDevFiles")
    return not cards and machine.available_cores() < (os.cpu_count() or 1)


def _writer(file: IO[str]) -> Notify:
    """Returns a function that writes events to a file, and a `step` at most once in `BETWEEN_STEPS` seconds."""
    last = -BETWEEN_STEPS

    def write(event: Event) -> None:
        nonlocal last
        if isinstance(event, Step):
            if time.monotonic() - last < BETWEEN_STEPS:
                return
            last = time.monotonic()
        with suppress(OSError):
            file.write(encode(event) + "\n")
            file.flush()

    return write


class Slurm:
    """Executor of runs as SLURM jobs. `options` are those of sbatch, such as partition, time, gpus, cpus-per-task;
    `array-parallelism` is the number of parallel jobs.

    Raises RequestError if this machine cannot submit jobs."""

    workers, shared, here = 1, False, False

    def __init__(
        self,
        options: Mapping[str, str] | None = None,
        queue: Queue | None = None,
        looks: float = BETWEEN_LOOKS,
        questions: float = BETWEEN_QUESTIONS,
    ):
        self.queue = queue or Sbatch(options or {})
        self.looks, self.questions = looks, questions

    def run(self, requests: Sequence[RunRequest], folder: Path, notify: Notify = silent) -> Iterator[RunResult]:
        if not requests:
            return
        jobs = _Jobs(self.queue, folder.resolve(), [_Job(request, folder.resolve()) for request in requests])
        jobs.begin()
        asked, states = time.monotonic(), jobs.states()
        try:
            while jobs.left:
                for job in list(jobs.left):
                    job.tell(notify)
                    result = jobs.result(job, states)
                    if result is not None:
                        jobs.left.remove(job)
                        notify(End(name=job.request.name, seed=job.request.seed, result=result))
                        yield result
                if jobs.left:
                    time.sleep(self.looks)
                if time.monotonic() - asked >= self.questions:
                    jobs.submit([job for job in jobs.left if job.name is None and not job.owner.alive()])
                    asked, states = time.monotonic(), jobs.states()
        except (KeyboardInterrupt, GeneratorExit):
            if names := sorted({str(job.name).split("_")[0] for job in jobs.left if job.name is not None}):
                notify(
                    StageEvent(words=f"{len(jobs.left)} runs remain in the queue; scancel {' '.join(names)} ends them")
                )
            raise


class _Job:
    """Requested run, and the job of the queue that trains it."""

    def __init__(self, request: RunRequest, folder: Path):
        self.request, self.place = request, request.place(folder)
        self.name: str | None = None
        """Name of the job; None before it is submitted."""
        self.lives = LIVES
        self.missed = 0
        """Number of consecutive queries in which the queue did not know the job."""
        self.owner = OwnerWatch(self.place)
        self.read = 0
        self.started = False
        self.error: str | None = None

    def tell(self, notify: Notify) -> None:
        """Sends `notify` the events that the run has written to its file since the last call."""
        try:
            with (self.place / EVENTS).open("rb") as file:
                if file.seek(0, os.SEEK_END) < self.read:  # of a new job
                    self.read, self.started = 0, False
                file.seek(self.read)
                text = file.read()
        except OSError:
            return
        if not self.started:
            self.started = True
            notify(Start(name=self.request.name, seed=self.request.seed))
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.decode("utf-8", errors="replace").splitlines():
            if (event := decode(line)) is not None:
                self.error = event.error if isinstance(event, Error) else self.error
                notify(event)

    @property
    def outcome(self) -> int | None:
        """Exit status of the run, which its job writes at the end; None before that."""
        try:
            status = json.loads((self.place / OUTCOME).read_text(encoding="utf-8"))["status"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return status if isinstance(status, int) else None


class _Jobs:
    """Unfinished runs of a folder and their jobs, whose names are kept in jobs.json."""

    def __init__(self, queue: Queue, folder: Path, left: list[_Job]):
        self.queue, self.folder, self.left = queue, folder, left

    def begin(self) -> None:
        """Submits the runs that no earlier job and no other process trains; adopts the earlier jobs."""
        held = self._held()
        known = self.queue.states(list(held.values()))
        for job in self.left:
            name = held.get(job.place.name)
            if name is not None and known.get(name, "GONE") not in GONE | {"GONE"}:
                job.name = name
        self.submit([job for job in self.left if job.name is None and not job.owner.alive()])

    def submit(self, jobs: Sequence[_Job]) -> None:
        for first in range(0, len(jobs), LONGEST_ARRAY):
            some = jobs[first : first + LONGEST_ARRAY]
            for job in some:
                laid(job.request, self.folder)
                for left in (EVENTS, OUTCOME, COMPLAINTS):
                    (job.place / left).unlink(missing_ok=True)
            arms = [SlurmRun(str(job.place), job.request.name, job.request.seed) for job in some]
            for job, name in zip(some, self.queue.submit(arms, self.folder / LOGS), strict=True):
                job.name, job.missed, job.error, job.read, job.started = name, 0, None, 0, False
        if jobs:
            named = {job.place.name: job.name for job in self.left if job.name is not None}
            replace_text(self.folder / JOBS, json.dumps(self._held() | named))

    def states(self) -> dict[str, str]:
        """Returns {name of a job: its state in the queue}; counts the consecutive queries in which each job was
        missing."""
        states = self.queue.states([job.name for job in self.left if job.name is not None])
        for job in self.left:
            job.missed = 0 if states.get(str(job.name), "") not in GONE | {""} else job.missed + 1
        return states

    def result(self, job: _Job, states: Mapping[str, str]) -> RunResult | None:
        """Returns the result of a run that has ended, successfully or not; None while it runs. A job whose worker died
        loses its name, and is submitted again once no process trains its run."""
        if (job.place / RESULT).exists() and (result := finished(job.request, self.folder)) is not None:
            return result
        if job.name is None or job.missed < SURE:
            return None
        log = self.folder / LOGS / f"{job.name}_0_log.err"
        words, status, state = last_line(job.place / COMPLAINTS), job.outcome, states.get(job.name, "")
        job.name = None
        if status == 0:
            return failed(job.request, job.place, f"{job.place / RESULT} is not what a trained arm leaves")
        if status is not None and status > 0:
            return failed(job.request, job.place, job.error or words or ending(status))
        if state == "CANCELLED":
            return failed(job.request, job.place, "its job was cancelled")
        if job.lives == 0:
            why = words or last_line(log) or ending(status or -signal.SIGKILL)
            return failed(job.request, job.place, f"its worker died {LIVES + 1} times: {why}")
        job.lives -= 1
        return None

    def _held(self) -> dict[str, str]:
        try:
            tree = json.loads((self.folder / JOBS).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return {k: v for k, v in tree.items() if isinstance(v, str)} if isinstance(tree, dict) else {}


class Sbatch:
    """Queue that submits arrays by submitit, and calls squeue."""

    def __init__(self, options: Mapping[str, str]):
        if shutil.which("sbatch") is None or shutil.which("squeue") is None:
            raise RequestError(
                "executor=slurm needs sbatch and squeue, which are not on this machine; run the command where jobs are "
                "submitted",
                code="missing", field="executor", value="slurm", expected="a machine of a SLURM cluster",
            )  # fmt: skip
        try:
            self.submitit = importlib.import_module("submitit")
        except ImportError:
            raise RequestError(
                "executor=slurm needs submitit: pip install 'glassformer[slurm]'",
                code="missing", field="executor", value="slurm", expected="the extra slurm",
            ) from None  # fmt: skip
        own = dict(options)
        self.minutes = _minutes(own.pop("time", str(MINUTES)))
        at_once = own.pop("array-parallelism", str(LONGEST_ARRAY))
        if not at_once.isdecimal() or int(at_once) < 1:
            raise RequestError(
                code="type", field="array-parallelism", value=at_once, expected="a whole number from 1 up"
            )
        self.at_once = int(at_once)
        self.options = {name: True if value == "" else value for name, value in own.items()}

    def submit(self, arms: Sequence[SlurmRun], folder: Path) -> list[str]:
        root = Path(__file__).parents[2]
        executor = self.submitit.AutoExecutor(folder=folder, cluster="slurm", slurm_max_num_timeout=TIMES_OUT)
        executor.update_parameters(
            name="glassformer",
            timeout_min=self.minutes,
            slurm_array_parallelism=self.at_once,
            slurm_setup=[f'export PYTHONPATH={shlex.quote(str(root))}"${{PYTHONPATH:+:$PYTHONPATH}}"'],
            slurm_additional_parameters={"requeue": True, **self.options},
        )
        try:
            with executor.batch():
                jobs = [executor.submit(arm) for arm in arms]
        except (subprocess.CalledProcessError, self.submitit.core.utils.FailedJobError) as error:
            said = [line for line in str(error).splitlines() if "sbatch: error" in line] or [
                str(error).splitlines()[-1]
            ]
            raise RequestError(
                f"sbatch takes no jobs with these options: {said[0].strip()[:LONGEST]}",
                code="range", field="executor", value=str(self.options), expected="options of sbatch",
            ) from None  # fmt: skip
        return [job.job_id for job in jobs]

    def states(self, names: Sequence[str]) -> dict[str, str]:
        arrays = sorted({name.split("_")[0] for name in names})
        if not arrays:
            return {}
        ask = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T", f"--jobs={','.join(arrays)}"]
        found = subprocess.run(ask, capture_output=True, text=True)
        if found.returncode != 0 and "Invalid job id" not in found.stderr:
            return dict.fromkeys(names, "UNKNOWN")  # the controller does not answer at the moment
        return dict(line.split() for line in found.stdout.splitlines() if len(line.split()) == 2)


def _minutes(text: str) -> int:
    """Returns the time of sbatch in minutes: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S. Raises RequestError."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise RequestError(code="type", field="time", value=text, expected="minutes, H:M:S or D-H:M:S")
    days, *rest = match.groups()
    first, second, third = (int(one or 0) for one in rest)
    if days is not None:
        minutes = int(days) * 1440 + first * 60 + second + (third > 0)
    elif rest[2] is not None:
        minutes = first * 60 + second + (third > 0)
    else:
        minutes = first + (second > 0)
    if minutes < 1:
        raise RequestError(code="range", field="time", value=text, expected="a minute or more")
    return minutes


def executor_of(
    executor: str = "here", slots: str | None = None, workers: int | None = None, device: str = "auto"
) -> Executor:
    """Returns the executor for these options.

    executor  here; slurm, or slurm:OPTION=VALUE,OPTION=VALUE with options of sbatch
    slots     devices of this machine: cuda:0,cuda:1
    workers   parallel runs on this machine; if None, a comparison chooses their number
    device    device that the runs request

    Raises RequestError."""
    kind, _, rest = executor.partition(":")
    if kind not in ("here", "slurm") or (kind == "here" and rest):
        raise RequestError(code="type", field="executor", value=executor, expected="here or slurm:OPTION=VALUE,...")
    given = {"executor": kind != "here", "slots": slots is not None, "workers": workers not in (None, 1)}
    if len(both := [f"--{name}" for name, there in given.items() if there]) > 1:
        message = f"{' and '.join(both)} each say where runs are trained; give one of them"
        raise RequestError(message, code="conflict", field=both[1][2:], value=slots or workers, expected="left out")
    if slots is not None:
        return Slots([one.strip() for one in slots.split(",") if one.strip()], device)
    if kind == "here":
        return Local(workers)
    return Slurm(_options(rest))


def _options(text: str) -> dict[str, str]:
    """Returns the options of NAME=VALUE,NAME=VALUE; a value may have commas, and a flag is NAME= without one."""
    found: dict[str, str] = {}
    for one in re.split(r",(?=[a-z-]+=)", text) if text else []:
        name, equals, value = one.partition("=")
        if not re.fullmatch(r"[a-z]+(-[a-z]+)*", name) or not equals or name in found or "\n" in value:
            raise RequestError(
                code="type", field="executor", value=one, expected="options of sbatch as partition=NAME,time=MINUTES"
            )
        found[name] = value
    return found
