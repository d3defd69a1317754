"""Runs of different sizes and budgets, asked for as plain values: kept, trained, failed, stopped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from glassformer.parts.core.base import to_plain
from glassformer.runs import workers
from glassformer.runs.events import End, Error, Event, Kept, Notify, Start, Step, silent
from glassformer.runs.executor import Local, execute, finished, kept, laid
from glassformer.runs.files import read_result
from glassformer.runs.request import RunRequest, place_of
from glassformer.runs.workers import WorkerRun
from tests.refused import failed
from tests.runs.stand_in import AT_ONCE, Instead, trained_at_once


def test_runs_of_different_sizes_and_budgets_are_trained_and_kept(asked: list[RunRequest], tmp_path: Path) -> None:
    """By real processes; the second time none starts."""
    events: list[Event] = []
    first = list(execute(asked, tmp_path, notify=events.append))
    assert [(one.key, one.status) for one in first] == [(request.key, "ok") for request in asked]
    assert [one.train.steps for one in first if one.train] == [4, 2]
    for request, result in zip(asked, first, strict=True):
        assert result.config == request.config.to_dict() and result.recipe == to_plain(request.recipe)
        assert result.complete
        assert read_result(request.place(tmp_path)) == result
        assert [type(event) for event in events if event.key == request.key][:1] == [Start]  # type: ignore[union-attr]
    assert {Start, Step, End} <= {type(event) for event in events}
    events.clear()
    assert list(execute(asked, tmp_path, notify=events.append)) == first
    assert [type(event) for event in events] == [Kept, Kept]


def test_result_answers_only_its_request(asked: list[RunRequest], tmp_path: Path) -> None:
    request, other = asked
    (result,) = AT_ONCE.run([request], tmp_path)
    assert finished(request, tmp_path) == result and kept(asked, tmp_path) == {request.key: result}
    for wanted in (
        replace(request, recipe=request.recipe.replace(learning_rate=0.5)),
        replace(request, config=request.config.replace(vocab_size=99)),
        replace(request, config=other.config),
    ):
        assert not wanted.answered_by(result) and finished(wanted, tmp_path) is None
    assert replace(request, log_to=("tensorboard",)).answered_by(result)


def test_failed_run_does_not_affect_others_and_is_tried_again(asked: list[RunRequest], tmp_path: Path) -> None:
    def fails(place: Path, notify: Callable[[Event], None]) -> tuple[str | None, int]:
        return ("the disk is full", 1) if "gpt2" in place.name else trained_at_once(place, notify)

    results = list(execute(asked, tmp_path, Instead(fails)))
    assert [(one.status, one.error) for one in results] == [("failed", "the disk is full"), ("ok", None)]
    assert results[0].parameters == asked[0].config.num_params()
    events: list[Event] = []
    assert [one.status for one in execute(asked, tmp_path, AT_ONCE, events.append)] == ["ok", "ok"]
    assert [event.key for event in events if isinstance(event, Start)] == [asked[0].key]


def test_last_output_of_a_process_is_its_error(
    asked: list[RunRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is an event or the last line of a traceback; other lines are skipped."""
    said = Error(name="a", seed=0, error="no such text").model_dump_json()
    for code, words in (
        (f"print('hello'); print({said!r}); sys.exit(2)", "no such text"),
        ("raise ValueError('shapes differ')", "ValueError: shapes differ"),
        ("import os; os._exit(3)", "the process ended with status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "status -9 (out of memory?)"),
        ("", "result.json is not what a trained arm leaves"),
    ):
        monkeypatch.setattr(workers, "START", f"import sys\n{code}")
        (result,) = Local().run(asked[:1], tmp_path)
        assert result.status == "failed" and str(result.error).endswith(words)


def test_stopped_run_saves_and_starts_no_other(
    asked: list[RunRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is passed on to the process once, and nothing after it starts."""
    monkeypatch.setattr(workers, "START", WAITS)
    events: list[Event] = []

    def notify(event: Event) -> None:
        events.append(event)
        if isinstance(event, Step):
            raise KeyboardInterrupt

    with failed(code="stopped"):
        list(Local().run(asked, tmp_path, notify))
    assert [type(event) for event in events] == [Start, Step]
    assert (asked[0].place(tmp_path) / "saved").is_file()


WAITS = """
import json, signal, sys, time
from pathlib import Path
place = Path(json.loads(sys.stdin.readline()))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in what runs in the background
try:
    print('{"event": "step", "name": "a", "seed": 0, "step": 1, "done": 0.5, "loss": 1, "tokens_per_second": 1, '
          '"seconds_left": 1}', flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    (place / "saved").touch()
"""


def test_places_are_different_for_different_names() -> None:
    names = ["a", "a b", "a/b", "a_b", "x" * 90, "x" * 91, "../a", "A"]
    places = {place_of(Path("out"), name, seed) for name in names for seed in (0, 1)}
    assert len(places) == 2 * len(names) and all(place.parent == Path("out/runs") for place in places)


def test_moved_folder_keeps_its_results(asked: list[RunRequest], tmp_path: Path) -> None:
    """The folder moves as a whole, and its results are still kept."""
    list(AT_ONCE.run(asked, tmp_path / "here"))
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert len(kept(asked, tmp_path / "there")) == 2


def test_one_process_trains_run_after_run(asked: list[RunRequest], tmp_path: Path) -> None:
    """Two processes run in parallel, each taking the next run when free; results equal those of separate processes."""
    more = [replace(one, recipe=one.recipe.replace(seed=9)) for one in asked]
    with_processes: dict[str, list[str]] = {}

    class Watched(Local):
        def training(self, place: Path) -> WorkerRun:
            found = super().training(place)
            return Told(found, with_processes)

    class Told(WorkerRun):
        def __init__(self, inner: WorkerRun, told: dict[str, list[str]]):
            super().__init__(inner.place)
            self.told = told

        def run(self, notify: Notify) -> tuple[str | None, int]:
            ended = super().run(notify)
            assert self.worker is not None
            self.told.setdefault(str(self.worker.process.pid), []).append(self.place.name)
            return ended

    side_by_side = {one.key: one for one in Watched(2).run([*asked, *more], tmp_path)}
    assert len(with_processes) == 2 and max(map(len, with_processes.values())) >= 2
    for request in more:
        (alone,) = Local().run([request], tmp_path / "alone")
        assert alone.validation == side_by_side[request.key].validation


def test_processes_that_wait_for_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the same environment take one in place of a new process, unless it has ended."""
    lines = f"{workers.BEGUN}\n{workers.ENDED}"
    monkeypatch.setattr(workers, "START", f"import sys\nfor _ in sys.stdin: print({lines!r}, flush=True)")
    pool = workers.Pool()
    monkeypatch.setattr(workers, "POOL", pool)
    pool.prepare(2)
    pool.prepare(2)
    ready = {worker.process.pid for worker in pool.idle}
    run = WorkerRun(tmp_path)
    assert len(ready) == 2 and run.run(silent) == (None, 0)
    assert run.worker is not None and run.worker.process.pid in ready
    for worker in pool.idle:
        worker.process.kill()
        worker.process.wait()
    another = WorkerRun(tmp_path)
    assert another.run(silent) == (None, 0)
    assert another.worker is not None and another.worker.process.pid not in ready
    assert pool.take({"PATH": "elsewhere"}) is None and not pool.idle


COPIES = """
import signal, sys
from pathlib import Path
from glassformer.runs import workers
from glassformer.runs.arm import main
workers.POOL.prepare(3, main)
copies = {worker.process.pid for worker in workers.POOL.idle}
first = workers.POOL.idle[0].process
first.kill()
print(first.wait(), first.poll(), all(isinstance(one.process, workers.Copy) for one in workers.POOL.idle))
from glassformer.runs.workers import WorkerRun
for place in sys.argv[1:]:
    run = WorkerRun(Path(place))
    ended = run.run(lambda event: None)
    print(ended, run.worker.process.pid in copies)
stopped = run.worker.process
stopped.send_signal(signal.SIGTERM)
print(stopped.wait())
"""


ENDS = """
import os, signal, sys, time
from glassformer.runs.workers import Copy
def complains():
    os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 2)
    print("half a line", end="", file=sys.stderr)
    return 3
def fails():
    os.dup2(os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT), 2)
    raise ValueError("wrong")
def waits():
    print("waits", flush=True)
    time.sleep(60)
print([Copy(main).wait() for main in (complains, fails)])
copy = Copy(waits)
copy.stdout.readline()
copy.send_signal(signal.SIGINT)
print(copy.wait(), copy.poll())
copy.kill()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(Copy(lambda: 3).wait())
"""


@pytest.mark.skipif(not workers.FORKS, reason="processes are not copied here")
def test_ends_of_copies_are_those_of_processes(tmp_path: Path) -> None:
    """An exit status, with a line on standard error that has no end; an exception; a signal; and no status if the
    command ignores the end of its children."""
    files = [tmp_path / "complains.txt", tmp_path / "fails.txt"]
    done = subprocess.run([sys.executable, "-c", ENDS, *files], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[3, 1]", "-2 -2", "0"], done.stderr
    assert files[0].read_text() == "half a line"
    assert files[1].read_text().splitlines()[-1] == "ValueError: wrong"


@pytest.mark.skipif(not workers.FORKS, reason="processes are not copied here")
def test_copies_of_a_process_train_as_new_processes_do(asked: list[RunRequest], tmp_path: Path) -> None:
    """In a process that has only imported; one copy is killed before its run, and another copy takes it."""
    places = [laid(request, tmp_path) for request in asked]
    done = subprocess.run([sys.executable, "-c", COPIES, *places], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n") == ["-9 -9 True", "(None, 0) True", "(None, 0) True", "-15", ""], done.stderr
    for request, result in zip(asked, Local().run(asked, tmp_path / "apart"), strict=True):
        own = read_result(request.place(tmp_path))
        assert own is not None and own.validation == result.validation
        assert (request.place(tmp_path) / workers.COMPLAINTS).read_text() == ""


def test_the_next_run_begins_before_a_result_is_used(asked: list[RunRequest], tmp_path: Path) -> None:
    events: list[Event] = []
    next(AT_ONCE.run(asked, tmp_path, events.append))
    assert [(type(one), one.key) for one in events if isinstance(one, Start | End)] == [
        (Start, asked[0].key), (End, asked[0].key), (Start, asked[1].key),
    ]  # fmt: skip


def test_trial_does_not_answer_a_full_request(asked: list[RunRequest], tmp_path: Path) -> None:
    trial = replace(asked[0], loss_alone=True)
    (result,) = Local().run([trial], tmp_path)
    assert result.loss_alone and result.complete and result.generation is None and not result.extrapolation
    assert finished(trial, tmp_path) == result and finished(asked[0], tmp_path) is None
