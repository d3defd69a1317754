"""Runs as jobs: on a queue that is a dictionary, and on a SLURM cluster of this machine if it can be started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glassformer.errors import Code, RequestError
from glassformer.runs import workers
from glassformer.runs.arm import BEGUN
from glassformer.runs.events import End, Error, Event, Measuring, StageEvent, Step, decode
from glassformer.runs.executor import Local, execute
from glassformer.runs.request import RunRequest, TextPlaces
from glassformer.runs.slurm import LIVES, Slurm, SlurmRun, _minutes, _options, executor_of
from tests.refused import refused
from tests.runs.local_slurm import cluster, missing
from tests.runs.stand_in import ask, trained_at_once

Deed = Callable[[Path, int], str]
"""Action of a worker on a run's folder at the n-th attempt -> the state of its job afterwards."""


class Quick:
    """A queue whose jobs have ended, or will not start, as soon as they are submitted."""

    def __init__(self, deed: Deed):
        self.deed, self.jobs, self.arrays = deed, dict[str, str](), list[list[str]]()
        self.times = Counter[str]()

    def submit(self, arms: Sequence[SlurmRun], folder: Path) -> list[str]:
        names = [f"{len(self.arrays)}_{index}" for index in range(len(arms))]
        self.arrays.append([arm.name for arm in arms])
        for name, arm in zip(names, arms, strict=True):
            self.times[arm.name] += 1
            self.jobs[name] = self.deed(Path(arm.place), self.times[arm.name])
        return names

    def states(self, names: Sequence[str]) -> dict[str, str]:
        return {name: self.jobs[name] for name in names if name in self.jobs}

    def executor(self) -> Slurm:
        return Slurm(queue=self, looks=0.001, questions=0.001)


def left(place: Path, status: int | None = None, stderr: str = "") -> None:
    (place / "stderr.txt").write_text(stderr)
    if status is not None:
        (place / "outcome.json").write_text(json.dumps({"status": status}))


def trained(place: Path) -> str:
    trained_at_once(place, None)
    left(place, 0)
    return "COMPLETED"


def test_all_runs_are_one_array(asked: list[RunRequest], tmp_path: Path) -> None:
    queue, events = Quick(lambda place, time: trained(place)), list[Event]()
    results = list(execute(asked, tmp_path, queue.executor(), events.append))
    assert [one.key for one in results] == [one.key for one in asked] and {one.status for one in results} == {"ok"}
    assert queue.arrays == [[one.name for one in asked]]
    assert [event.key for event in events if isinstance(event, End)] == [one.key for one in asked]


def test_run_of_a_dead_worker_resumes_in_a_new_job(asked: list[RunRequest], tmp_path: Path) -> None:
    """By itself in a new job, and no more than LIVES times."""

    def deed(place: Path, time: int) -> str:
        if "gpt2" in place.name or time < 2:
            left(place, -9 if time == 1 else None, "a warning\nslurmstepd: error: oom_kill event\n")
            return "NODE_FAIL"
        return trained(place)

    queue = Quick(deed)
    found = {one.name: one for one in queue.executor().run(asked, tmp_path)}
    (dead, moved) = (found[one.name] for one in asked)
    assert moved.status == "ok" and queue.times[moved.name] == 2
    assert dead.status == "failed" and queue.times[dead.name] == 1 + LIVES == 4
    assert dead.error == "its worker died 4 times: slurmstepd: error: oom_kill event"


@pytest.mark.parametrize(
    ("status", "state", "words"),
    [(1, "COMPLETED", "ValueError: shapes differ"), (0, "COMPLETED", "not what a trained arm leaves"),
     (None, "CANCELLED", "its job was cancelled")],
)  # fmt: skip
def test_run_that_fails_by_itself_is_not_tried_again(
    status: int | None, state: str, words: str, asked: list[RunRequest], tmp_path: Path
) -> None:
    def deed(place: Path, time: int) -> str:
        left(place, status, "Traceback\nValueError: shapes differ\n")
        return state

    queue = Quick(deed)
    (result,) = queue.executor().run(asked[:1], tmp_path)
    assert result.status == "failed" and str(result.error).endswith(words) and queue.times.total() == 1


def test_jobs_continue_after_an_interrupt_of_the_caller(asked: list[RunRequest], tmp_path: Path) -> None:
    """Jobs that wait or run are found again and not submitted twice; one whose name is lost is left to its owner."""
    queue = Quick(lambda place, time: "PENDING")
    events = list[Event]()

    def look(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("glassformer.runs.slurm.time.sleep", look)
        list(queue.executor().run(asked, tmp_path, events.append))
    assert events == [StageEvent(words="2 runs remain in the queue; scancel 0 ends them")]
    (tmp_path / "jobs.json").write_text(json.dumps({asked[0].place(tmp_path).name: "0_0"}))
    (asked[1].place(tmp_path) / "owner.json").write_text(json.dumps({"host": "elsewhere", "token": "t"}))
    going = queue.executor().run(asked, tmp_path)
    for request in asked:
        trained(request.place(tmp_path))
    assert {one.status for one in going} == {"ok"} and len(queue.arrays) == 1


def test_job_passes_on_the_events_of_its_run(
    asked: list[RunRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events reach the caller through a file, few of the steps; a job that is preempted has its run saved."""
    monkeypatch.setattr(workers, "START", SAYS)
    place = tmp_path / "run"
    place.mkdir()
    arm = SlurmRun(str(place), "a", 0)
    helpers = SimpleNamespace(DelayedSubmission=lambda again: again)
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(helpers=helpers))
    again: list[SlurmRun] = []

    def preempted(*_: object) -> None:
        again.append(arm.checkpoint())

    before = signal.signal(signal.SIGALRM, preempted)
    try:
        said = threading.Thread(target=_once_said, args=(place / "events.jsonl", b"measuring"))
        said.start()
        with pytest.raises(SystemExit):
            arm()
    finally:
        signal.signal(signal.SIGALRM, before)
    said.join()
    assert (place / "saved").exists() and not (place / "outcome.json").exists()
    assert again == [SlurmRun(str(place), "a", 0)]
    events = [decode(line) for line in (place / "events.jsonl").read_text().splitlines()]
    assert [type(event) for event in events] == [Step, Measuring, Error]


SAYS = """
import json, signal, sys, time
place = json.loads(sys.stdin.readline())
print("STARTED", flush=True)
step = '{"event": "step", "name": "a", "seed": 0, "step": %d, "done": 0.5, "loss": 1, "tokens_per_second": 1, '
step += '"seconds_left": 1}'
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.raise_signal(signal.SIGUSR2)  # of the scheduler, which is not for the run
for n in range(9):
    print(step % n, flush=True)
try:
    print('{"event": "measuring", "name": "a", "seed": 0}', flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    open(place + "/saved", "w").close()
    print('{"event": "error", "name": "a", "seed": 0, "error": "stopped"}', flush=True)
sys.exit(75)
""".replace("STARTED", BEGUN)


def _once_said(file: Path, words: bytes) -> None:
    """A signal to this process once a run has said so."""
    while not file.exists() or words not in file.read_bytes():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGALRM)


@pytest.mark.parametrize(
    ("words", "code", "field", "value"),
    [
        (("nowhere",), "type", "executor", "nowhere"),
        (("here:partition=x",), "type", "executor", "here:partition=x"),
        (("slurm", "cpu"), "conflict", "slots", "cpu"),
        (("here", "cpu", 2), "conflict", "workers", "cpu"),
        (("slurm:partition",), "type", "executor", "partition"),
        (("slurm:time=1,time=2",), "type", "executor", "time=2"),
        (("here", ""), "missing", "slots", ""),
        (("here", "tpu:0"), "unsupported", "device", "tpu:0"),
        (("here", "cpu", 1, "cuda"), "conflict", "device", "cuda"),
    ],
)
def test_words_that_name_no_executor(words: tuple[Any, ...], code: Code, field: str, value: object) -> None:
    with refused(code=code, field=field) as caught:
        executor_of(*words)
    assert caught.value.value == value


def test_a_machine_that_submits_no_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with refused(code="missing", field="executor"):
        executor_of("slurm")


def test_options_of_sbatch() -> None:
    assert _options("partition=a,nodelist=n1,n2,exclusive=") == {
        "partition": "a", "nodelist": "n1,n2", "exclusive": ""
    }  # fmt: skip
    times = {"30": 30, "30:01": 31, "2:00:00": 120, "1-0": 1440, "1-2:30": 1590}
    assert {text: _minutes(text) for text in times} == times
    for wrong in ("0", "soon", "1:2:3:4"):
        with pytest.raises(RequestError):
            _minutes(wrong)


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=f"no SLURM: {missing()}")
def test_a_real_cluster(places: TextPlaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs in one array. The worker of one is killed, the job of another preempted, and the caller goes away: all
    end as undisturbed runs do, bit for bit."""
    pytest.importorskip("submitit")
    tiny = "+layers=1+d_model=16+heads=2"
    names = [f"{name}@1m{tiny}" for name in ("gpt2", "llama", "bloom")]
    runs = [ask(places, name, tokens=200_000, checkpoint_seconds=0.5) for name in names]
    out, told = tmp_path / "out", list[Event]()
    killed, preempted = names[0], names[1]
    disturbed: dict[str, str] = {}

    def disturb(event: Event) -> None:
        told.append(event)
        if not isinstance(event, Step) or not 0 < event.done < 0.9 or event.name in disturbed:
            return
        place = next(run for run in runs if run.name == event.name).place(out)
        if event.name == killed:
            worker = _parent(json.loads((place / "owner.json").read_text())["pid"])
            os.kill(worker, signal.SIGKILL)
        elif event.name == preempted:
            job = json.loads((out / "jobs.json").read_text())[place.name]
            subprocess.run(["scancel", "--signal=USR2", job], check=True)
        else:
            return
        disturbed[event.name] = "yes"
        if len(disturbed) == 2:
            raise KeyboardInterrupt

    with cluster(tmp_path / "cluster") as config:
        monkeypatch.setenv("SLURM_CONF", str(config))
        with pytest.raises(KeyboardInterrupt):
            list(_eager("slurm:time=10,mem=0").run(runs, out, disturb))
        assert isinstance(told[-1], StageEvent) and "remain in the queue" in told[-1].words
        first = json.loads((out / "jobs.json").read_text())
        array = {job.split("_")[0] for job in first.values()}
        assert len(array) == 1 and len(first) == 3
        results = {one.name: one for one in _eager("slurm:time=10,mem=0").run(runs, out, told.append)}
        second = json.loads((out / "jobs.json").read_text())
    assert [results[name].status for name in names] == ["ok"] * 3, [one.error for one in results.values()]
    changed = {place for place in first if first[place] != second[place]}
    assert changed == {runs[0].place(out).name}, "only the killed worker's run has another job"
    for run, alone in zip(runs, Local().run(runs, tmp_path / "alone"), strict=True):
        found = results[run.name]
        assert found.train is not None and alone.train is not None
        assert (found.train.curve, found.validation) == (alone.train.curve, alone.validation)


def _eager(words: str) -> Slurm:
    executor = executor_of(words)
    assert isinstance(executor, Slurm)
    executor.looks, executor.questions = 0.1, 1.0
    return executor


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
