"""Progress on standard error: bars in a terminal, lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from glassformer.figures.terminal import clock, decimals, one_line
from glassformer.progress import listened
from glassformer.runs import events
from glassformer.runs.events import Notify, reading, silent
from glassformer.runs.results import RunResult

LEAD, WRITTEN = 24, 120
"""Characters of the prompt, and of the generated text, in a line of progress."""

FIRST = 1.0
"""Seconds of a stage before its first line, and before the time left is estimated."""
PATIENCE = 5.0
"""Seconds between two lines of progress, if standard error draws no bars."""


@contextmanager
def shown(progress: bool | Notify) -> Iterator[Notify]:
    """Yields the function that receives the events of a verb.

    `progress` is the function itself, or False for silence, or True for the display of the command line on standard
    error: bars on a terminal and in a notebook, lines elsewhere."""
    if not isinstance(progress, bool):
        with listened(reading(progress)):
            yield progress
    elif progress:
        with ComparisonView() as view:
            yield view.event
    else:
        with listened(reading(silent)):
            yield silent


class View:
    """Display of progress on standard error, so that standard output holds only the result."""

    def __init__(self, quiet: bool = False):
        self.console = Console(stderr=True, quiet=quiet)
        self.bars = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%", markup=False),
            TextColumn("{task.fields[note]}", markup=False),
            console=self.console,
            disable=quiet,
        )
        self.reading: dict[str, TaskID] = {}
        self.plain = not self.console.is_terminal and not quiet
        self.spoke = 0.0
        self.told: dict[str, float] = {}
        """Time of the latest line of each stage, or of its start."""
        self.started: dict[str, float] = {}
        """Time of the start of each stage."""

    def __enter__(self) -> Any:
        if not self.plain:
            self.bars.start()
        self.listening = listened(self.progress)
        self.listening.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.listening.__exit__(None, None, None)
        if not self.plain:
            self.bars.stop()

    def progress(self, stage: str, done: int, total: int | None) -> None:
        if self.plain:
            self._tell(stage, done, total)
            return
        if stage not in self.reading:
            self.reading[stage] = self.bars.add_task(stage, total=total, note="")
        task, left = self.reading[stage], self._left(stage, done, total)
        self.bars.update(task, completed=done, total=total, note=left if total else f"{done:,}" if done else "")
        if total is not None and done >= total:
            self.bars.update(task, visible=False)

    def _tell(self, stage: str, done: int, total: int | None) -> None:
        """Prints a line on the progress of a long stage, unless one was printed in the last `PATIENCE` seconds."""
        now, left = time.monotonic(), self._left(stage, done, total)
        if now - self.told.get(stage, self.started[stage] + FIRST - PATIENCE) > PATIENCE:
            self.told[stage] = now
            share = f"{done:,}" if total is None else f"{done / max(total, 1):.0%}"
            self.say(f"{stage}: {share}{left and f', {left}'}")

    def _left(self, stage: str, done: int, total: int | None) -> str:
        """Returns the remaining time of a stage, once it has lasted a second and made progress; else an empty text."""
        spent = time.monotonic() - self.started.setdefault(stage, time.monotonic())
        if not total or not 0 < done < total or spent < FIRST:
            return ""
        return f"{clock(spent / done * (total - done))} left"

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class ComparisonView(View):
    """Display of the progress of comparisons, with one bar for each run: loss, tokens/s, remaining time."""

    def __init__(self, quiet: bool = False):
        super().__init__(quiet)
        self.tasks: dict[tuple[str, int], TaskID] = {}
        self.several = False
        self.noted: list[str] = []
        self.all_runs: TaskID | None = None
        """Bar of all runs of a plan."""
        self.planned = self.ended = 0
        self.heard: set[str] = set()
        self.first: dict[tuple[str, int], tuple[float, float]] = {}
        """Time and fraction done of each run at its first event."""
        self.over: set[tuple[str, int]] = set()
        """Runs that have ended."""

    def event(self, event: events.Event) -> None:
        if isinstance(event, events.StageEvent):
            self.say(event.words)
        elif isinstance(event, events.ReadingEvent):
            self.progress(event.stage, event.done, event.total)
        elif isinstance(event, events.Begin):
            self._begin(event)
        elif isinstance(event, events.PlanEvent):
            self.console.print(event.plan)
            self.heard.update(event.plan.notes)
            self.planned = len(event.plan.runs)
            self.all_runs = self.bars.add_task("all runs", total=self.planned, note="")
        elif event.key in self.tasks:
            self._progress(event, self.tasks[event.key])
            if self.all_runs is not None and isinstance(event, events.Kept | events.End):
                self.ended += 1
                note = f"{self.ended} of {self.planned}"
                self.bars.update(self.all_runs, completed=self.ended, note=note)

    def _begin(self, event: events.Begin) -> None:
        for stage in self.reading.values():
            self.bars.update(stage, visible=False)
        planned = self.all_runs is not None  # many comparisons, which repeat nothing
        said = [*([event.how] if event.how else []), *(f"note: {note}" for note in event.notes)]
        for words in said if not planned else [one for one in said if one.removeprefix("note: ") not in self.heard]:
            self.say(words)
            self.heard.add(words.removeprefix("note: "))
        self.noted = event.notes
        self.several = planned or any(seed for _, seed in event.runs)
        for task in self.tasks.values():  # of an earlier comparison
            self.bars.remove_task(task)
        self.tasks.clear()
        self.first.clear()
        self.over.clear()
        for name, seed in event.runs:
            label = f"{name} seed {seed}" if self.several else name
            self.tasks[name, seed] = self.bars.add_task(label, total=1.0, note="waiting")

    def _progress(self, event: events.Event, task: TaskID) -> None:
        match event:
            case events.Start():
                self.bars.update(task, note="starting")
                if self.plain:
                    self.say(f"{event.name} seed {event.seed}: training")
            case events.Step():
                rate, norm = event.learning_rate, event.grad_norm
                told = "" if rate is None else f"lr {rate:.2e}  |g| {norm:.2f}  "
                speed, left = event.tokens_per_second, self._until_end(event)
                note = f"loss {event.loss:.3f}  {told}{speed:,.0f} tokens/s  {left} left"
                self.bars.update(task, completed=event.done, note=note)
                if event.validation is not None:
                    loss, bits = event.validation["loss"], event.validation["bits_per_byte"]
                    of_text = "" if bits is None else f", {decimals(bits)} bits per byte"
                    self.say(f"step {event.step}: held-out loss {loss:.4f}{of_text}")
                elif self.plain and time.monotonic() - self.spoke > 10:
                    self.spoke = time.monotonic()
                    self.say(f"  {event.done:>4.0%}  {note}")
            case events.Wrote():
                self.say(f"  it writes: …{one_line(event.prompt[-LEAD:])} | {one_line(event.text)[:WRITTEN]}")
            case events.Watched():
                self.say(f"{event.name} seed {event.seed}: {event.words}")
            case events.Measuring():
                self.bars.update(task, completed=1.0, note="measuring")
            case events.Kept() | events.End():
                ending = "finished before" if isinstance(event, events.Kept) else self._ending(event.result)
                self.bars.update(task, completed=1.0, note=ending)
                self.over.add(event.key)
                if self.plain:
                    self.say(f"{event.name} seed {event.seed}: {ending}")

    def _until_end(self, event: events.Step) -> str:
        """Returns the remaining time of a run as text, estimated from the time since its first event `step`, so that
        evaluations and checkpoints count; if runs are waiting, also that of all runs."""
        now = time.monotonic()
        at, done = self.first.setdefault(event.key, (now, event.done))
        spent, share = now - at, event.done - done
        each = spent / share if spent >= FIRST and share > 0 else math.nan
        left = each * (1 - event.done)
        waiting = len(self.tasks.keys() - self.first.keys() - self.over)
        beside = len(self.first.keys() - self.over)
        return clock(left) + (f" of this run and {clock(left + each * waiting / beside)} of all" if waiting else "")

    @staticmethod
    def _ending(run: RunResult) -> str:
        if run.status != "ok" or run.validation is None or run.train is None:
            return f"{run.status}: {run.error}"
        return f"validation loss {run.validation.loss:.4f}  {run.train.tokens_per_second:,.0f} tokens/s"
