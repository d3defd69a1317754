"""Runs of a comparison, read from their files: curves, events, folders. Each line of a file is read once."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from glassformer.config import ModelConfig
from glassformer.dynamics.records import NAME as DYNAMICS
from glassformer.dynamics.records import record_of
from glassformer.dynamics.summary import event_words, number, summary_of
from glassformer.errors import RequestError
from glassformer.figures import Axis, Series, fixed, line_chart
from glassformer.report.curves import top
from glassformer.runs.request import REQUEST, RUN, read_request
from glassformer.runs.results import Dynamics, Results, RunResult
from glassformer.studio.tail import Tail
from glassformer.training.progress import metrics_row

POINTS = 400
"""Approximate largest number of points of a curve that are drawn."""
EVENTS = 12
"""Largest number of events of a run that are named; the others are counted."""
NARROW = (380, 300)
AXES = Axis("Training tokens seen", unit="tokens"), "Loss, nats per token"


class Taken(NamedTuple):
    """Step of a run: its number, tokens so far, and loss."""

    step: int
    tokens: float
    loss: float


class Event(NamedTuple):
    """Event that a run recorded, such as a spike."""

    step: int
    words: str
    loss: float | None
    """Loss at a spike of the loss; None for other events."""


def _taken(line: bytes) -> Taken | None:
    row = metrics_row(line)
    return None if row is None or "loss" not in row else Taken(row["step"], float(row["tokens"]), float(row["loss"]))


def _event(line: bytes) -> Event | None:
    if b'"event"' not in line:
        return None
    row = record_of(line)
    if row is None or "event" not in row:
        return None
    value = number(row.get("value")) if row.get("what") == "loss" else None
    return Event(row["step"], event_words(row), value if value is not None and math.isfinite(value) else None)


@dataclass
class RunTrack:
    """Run of a comparison, with readers of its steps and events; `name` is the name of its folder."""

    name: str
    model: str
    seed: int
    folder: Path
    steps: Tail[Taken]
    events: Tail[Event]

    def points(self) -> list[tuple[float, float]]:
        """Returns (tokens, loss) of the steps, thinned to about `POINTS`."""
        rows = self.steps.rows()
        return [(row.tokens, row.loss) for row in rows[:: 1 + len(rows) // POINTS]]

    def marks(self) -> list[tuple[float, float]]:
        """Returns (tokens, loss) of the steps with an event, thinned to about `POINTS`."""
        rows, events = self.steps.rows(), self.events.rows()
        steps = [row.step for row in rows]
        found = []
        for event in events[:: 1 + len(events) // POINTS]:
            after = bisect_left(steps, event.step)
            near = min(rows[max(0, after - 1) : after + 1], key=lambda row: abs(row.step - event.step), default=None)
            if near is not None:
                found.append((near.tokens, near.loss if event.loss is None else event.loss))
        return found

    @property
    def finished(self) -> bool:
        """True if the run has ended and its weights can be loaded."""
        return (self.folder.parent / "result.json").is_file() and (self.folder / "latest").is_file()

    def to_dict(self) -> dict[str, object]:
        """Returns model, seed, progress in words, the latest events, and once the run has ended its folder."""
        self.steps.rows()
        events, last = self.events.rows(), self.steps.last
        told = "" if last is None else f"step {last.step:,}, {last.tokens:,.0f} tokens, loss {fixed(last.loss, 3)}"
        return {
            "run": self.name, "model": self.model, "seed": self.seed, "progress": told,
            "events": [event.words for event in events[-EVENTS:]], "more": max(0, len(events) - EVENTS),
            "weights": str(self.folder) if self.finished else None,
        }  # fmt: skip


class Tracks:
    """Runs of the comparison in a folder; iteration also finds new ones."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._known: dict[str, RunTrack] = {}

    def __iter__(self) -> Iterator[RunTrack]:
        """Yields the runs in the order of their folders' names."""
        for file in sorted(self.place.glob(f"runs/*/{REQUEST}")):
            name = file.parent.name
            if name not in self._known:
                asked = read_request(file.parent)
                with suppress(KeyError, TypeError, ValueError):
                    model, seed = str(asked["name"]), int(asked["recipe"]["seed"])
                    run = file.parent / RUN
                    self._known[name] = RunTrack(
                        name, model, seed, run, Tail(run / "metrics.jsonl", _taken), Tail(run / DYNAMICS, _event)
                    )
            if name in self._known:
                yield self._known[name]

    def named(self, name: str) -> RunTrack:
        """Returns the run with this name. Raises RequestError for an unknown name."""
        for one in self:
            if one.name == name:
                return one
        raise RequestError("the comparison has no such run", code="unknown", field="run", value=name)

    def series(self, first: int = 0, label: str = "{}", seeds: bool = True) -> list[Series]:
        """Returns a series for each model: the longest curve of its seeds thick, with `seeds` all of them thin, and a
        mark at each event. `first` is the style of the first series, `label` a format of the model's name."""
        models: dict[str, list[RunTrack]] = {}
        for one in self:
            models.setdefault(one.model, []).append(one)
        found = []
        for style, (model, runs) in enumerate(models.items(), first):
            lines = [one.points() for one in runs]
            thin = tuple(lines) if seeds and len(lines) > 1 else ()
            marks = tuple(mark for one in runs for mark in one.marks())
            found.append(Series(label.format(model), max(lines, key=len), style, thin=thin, markers=marks))
        return found

    def watched(self, found: Results | None) -> list[RunResult]:
        """Returns a result for each run: that in `found` for a finished run, else one with the statistics recorded so
        far."""
        ended = {} if found is None else {run.key: run for run in found.runs}
        return [ended.get((one.model, one.seed)) or _so_far(one) for one in self]


def _so_far(one: RunTrack) -> RunResult:
    config: dict[str, object] = {}
    with suppress(RequestError, OSError):
        config = ModelConfig.from_file(one.folder / "config.yaml").to_dict()
    return RunResult(name=one.model, seed=one.seed, config=config, dynamics=Dynamics.of(summary_of(one.folder)))


def charts(series: Sequence[Series], title: str) -> dict[str, str]:
    """Returns the charts `figure` (wide screens) and `narrow` of loss curves; spikes beyond the axis have a mark."""
    lines = [list(line) for one in series for line in (one.points, *one.thin)]
    x, label = AXES
    y = Axis(label, high=top([[(float(a), float(b)) for a, b in line] for line in lines]))
    return {
        "figure": line_chart(series, x, y, title),
        "narrow": line_chart(series, x, y, title, *NARROW, end_labels=False),
    }
