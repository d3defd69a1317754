"""Trainings that the studio starts as separate processes, and shows by reading only their files."""

from __future__ import annotations

import asyncio
import hashlib
import shlex
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from starlette.concurrency import run_in_threadpool

from glassformer.agents.comparisons import ASKED, MOST_LISTED, Comparisons
from glassformer.agents.tools import CompareTool, Expression, check_text_name
from glassformer.comparison import Design
from glassformer.comparison.design import FILE
from glassformer.comparison.experiment import run_command
from glassformer.errors import RequestError, WorkError, shown
from glassformer.figures import Series, fixed, legend
from glassformer.figures.terminal import clock
from glassformer.names.known import CORPORA, TASKS
from glassformer.planning.timed import check_memory
from glassformer.report.dynamics import live_dynamics
from glassformer.runs.arms import arms_of
from glassformer.runs.files import RESULTS, read_results
from glassformer.runs.results import Results, RunResult
from glassformer.runs.wording import best_words, verdict_sentence
from glassformer.serving.wire import dumps
from glassformer.studio.blocks import blocks
from glassformer.studio.bodies import MOST_OVER, TrainRequest
from glassformer.studio.texts import Texts
from glassformer.studio.tracks import Tracks, charts
from glassformer.training.post_mortem import why
from glassformer.training.recipe import WATCH
from glassformer.units import plural

BEAT = 0.5
"""Seconds between two messages of a stream; a message without news is a comment."""
FRESH = 1.0
"""Seconds for which a view is reused for all pages."""
MOST_VIEWS = 16
"""Largest number of comparisons whose views are kept."""
MOST_WEIGHTS = 40
"""Number of finished runs after which no further comparison is searched for the list of them."""
TEXTS = "texts"
"""Name of the folder, inside that of the comparisons, of texts that were dropped onto the page."""


class TrainTool(CompareTool):
    """Arguments of the agents' tool `compare`, but a single model is allowed."""

    models: Annotated[list[Expression], Field(min_length=1, max_length=8)]


@dataclass
class LatestView:
    """Latest view of a comparison, encoded as a message; `at` is the time at which it was checked."""

    id: str
    data: str
    running: bool
    at: float


class Runs:
    """Comparisons in a folder, with their views; another studio with the same folder sees the same comparisons."""

    def __init__(self, folder: Path) -> None:
        self.comparisons = Comparisons(folder, detached=True)
        self.texts = Texts(folder / TEXTS)
        self._tracks: dict[str, Tracks] = {}
        self._views: dict[str, LatestView] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    def listed(self) -> dict[str, Any]:
        """Returns a dict: `folder`, `runs` (comparisons, the latest first), `own` (names of texts in the folder),
        `texts` (the library's), `most_over` (largest number of comparisons in one figure)."""
        runs = [
            {**row, "data": self._text_of(row["name"]), "created": row.get("created") or self._asked_at(row["name"])}
            for row in self.comparisons.listed()
        ]
        return {
            "folder": str(self.comparisons.folder), "runs": runs, "own": self.texts.names(),
            "texts": [*CORPORA, *TASKS], "most_over": MOST_OVER,
        }  # fmt: skip

    def _text_of(self, name: str) -> str:
        return Path(str(self.comparisons.design_of(name).get("data", ""))).name

    def _asked_at(self, name: str) -> str:
        with suppress(OSError):
            asked = (self.comparisons.place(name) / ASKED).stat().st_mtime
            return datetime.fromtimestamp(asked, UTC).isoformat(timespec="seconds")
        return ""

    def design(self, given: TrainRequest) -> Design:
        """Returns the checked design of a training. Raises RequestError for an unfair design, for a text that is
        neither the library's nor in the folder of texts, and for a model that does not fit into memory."""
        data = self.texts.path(given.data)
        if data is None:
            check_text_name(given.data)
        tool = TrainTool(models=given.models, data="", minutes=given.minutes, tokens=given.tokens, seeds=given.seeds,
                         allow_unmatched=given.allow_unmatched)  # fmt: skip
        design = tool.design(given.data if data is None else str(data), watch=WATCH if given.watch else None)
        for name, config in design.configs.items():
            check_memory(name, config, "models", "choose a smaller size, such as @10m")
        return design

    def plan(self, given: TrainRequest) -> dict[str, Any]:
        """Returns runs and time of a training in words, the sizes of its models, and notes. Raises RequestError as
        `design` does."""
        design = self.design(given)
        runs = f"{plural(len(design.arms), 'model')} x {plural(design.seeds, 'seed')}"
        if design.minutes is not None:
            total = design.minutes * len(design.arms) * design.seeds
            words = f"{runs} x {clock(60 * design.minutes)}: about {clock(60 * total)} of training in all"
        else:
            words = f"{runs} x {design.tokens or 0:,} tokens: {self._time_of(design)}"
        sizes = [f"{name}: {config.num_params():,} parameters" for name, config in design.configs.items()]
        return {"words": words, "sizes": sizes, "notes": design.notes}

    def _time_of(self, design: Design) -> str:
        """Returns a clause with the time that a design takes at the speed of the latest comparison in the folder."""
        for name in self.comparisons.names():
            with suppress(OSError):
                place = self.comparisons.place(name)
                if speeds := _speeds(place, (place / RESULTS).stat().st_mtime_ns):
                    flops = sum(3 * one.flops(design.context) for one in design.configs.values())
                    seconds = design.seeds * (design.tokens or 0) * flops * len(speeds) / sum(speeds)
                    return f"about {clock(seconds)} of training in all, at the speed of {name}"
        return "no comparison in this folder says yet how fast this machine is"

    def start(self, given: TrainRequest) -> dict[str, Any]:
        """Starts a training; returns as `Comparisons.start`. Raises RequestError as `design` does, and while another
        training is computed."""
        return self.comparisons.start(self.design(given), None)

    def known(self, name: str) -> str:
        """Returns `name` if it is a comparison of the folder. Raises RequestError otherwise."""
        if name not in self.comparisons.names():
            raise RequestError(f"no comparison is named {shown(name)}", code="unknown", field="name", value=shown(name))
        return name

    def tracks(self, name: str) -> Tracks:
        """Returns the runs of a comparison, read from their files. Raises RequestError for an unknown name."""
        while len(self._tracks) > MOST_VIEWS:
            self._tracks.pop(next(iter(self._tracks)), None)
        return self._tracks.setdefault(name, Tracks(self.comparisons.place(self.known(name))))

    def view(self, name: str) -> dict[str, Any]:
        """Returns the state of a comparison, its curves and events so far, and once all its runs have ended its
        verdicts.

        Raises RequestError for an unknown name and for damaged files."""
        found = self.comparisons.outcome(self.known(name))
        tracks = self.tracks(name)
        series = tracks.series()
        results = self.comparisons.results_of(name) if found["state"] == "complete" else None
        ended = {run.key: _end(run) for run in (results.runs if results else ())}
        runs = [{**one.to_dict(), "held_out": ended.get((one.model, one.seed), "")} for one in tracks]
        return {
            "name": name, "state": found["state"], "progress": found.get("progress", ""), "data": self._text_of(name),
            "refused": found.get("refused", {}).get("message", ""), "similar": found["similar"],
            "runs_ended": found.get("runs_ended", len(found.get("runs", ()))),
            **charts(series, f"Training loss of {name} against tokens"), "legend": legend(series),
            "marks": any(one.markers for one in series), "runs": runs,
            "verdicts": [] if results is None else _verdicts(results),
            "report": self.page(name) is not None, **_how(self.comparisons.folder / name),
        }  # fmt: skip

    def over(self, names: list[str]) -> dict[str, Any]:
        """Returns the curves of several comparisons in one figure, with a letter for each, and notes on what cannot be
        compared. Raises RequestError for an unknown name."""
        series: list[Series] = []
        rows = []
        for letter, name in zip("ABCDEF", dict.fromkeys(names), strict=False):
            series += self.tracks(name).series(len(series), f"{letter} {{}}", seeds=False)
            state = self.comparisons.state(name, self.comparisons.results_of(name))
            rows.append({"letter": letter, "name": name, "data": self._text_of(name), "state": state})
        texts = {row["data"] for row in rows}
        kinds = [_terms(self.comparisons.design_of(row["name"])) for row in rows]
        notes = []
        if len(texts) > 1:
            notes.append("They read different texts, and losses on different texts do not compare.")
        elif any(one != other for one, other in pairwise(kinds)):
            notes.append("Their budgets, batches or contexts differ: learning rates fall at different tokens, so only "
                         "the ends of the curves compare.")  # fmt: skip
        notes.append("Curves of several trainings give no verdict: glassformer compare trains the models side by side.")
        return {"runs": rows, "notes": notes, "legend": legend(series),
                **charts(series, f"Training loss of {', '.join(names)} against tokens")}  # fmt: skip

    def why(self, name: str, run: str) -> dict[str, Any]:
        """Returns the diagnosis of a run. Raises RequestError for a run that has made no step."""
        folder = self.tracks(name).named(run).folder
        found = why(folder)
        return {**found.to_dict(), "lines": blocks(replace(found, losses=()).lines()),
                "commands": [shlex.join(["glassformer", "why", str(folder)])],
                "python": [f"gf.why({str(folder)!r})"]}  # fmt: skip

    def dynamics(self, name: str, statistic: str) -> dict[str, Any]:
        """Returns curves, and maps of one statistic by layer and step, that the runs have recorded so far."""
        results = None
        with suppress(RequestError):
            results = self.comparisons.results_of(name)
        tracks = self.tracks(name)
        found = live_dynamics(arms_of(tracks.watched(results)), statistic)
        design = self.comparisons.design_of(name)
        return {
            "statistics": found.statistics, "statistic": found.statistic, "curves": found.curves or "",
            "layers": found.layers or "", "words": found.words or "", "watched": bool(design.get("watch")),
            **_how(self.comparisons.folder / name),
        }  # fmt: skip

    def weights(self) -> dict[str, Path]:
        """Returns path (as text) -> folder of finished runs, those of the latest comparisons first."""
        found: dict[str, Path] = {}
        for name in self.comparisons.names():
            found |= {str(one.folder): one.folder for one in Tracks(self.comparisons.place(name)) if one.finished}
            if len(found) >= MOST_WEIGHTS:
                break
        return found

    def weights_of(self, path: str) -> Path | None:
        """Returns the folder of the finished run with this path; None for any other path, whose files stay closed."""
        parts = Path(path).parts[-4:-1]  # COMPARISON/runs/RUN
        with suppress(RequestError, ValueError):
            name, _, run = parts
            one = self.tracks(name).named(run)
            return one.folder if str(one.folder) == path and one.finished else None
        return None

    def page(self, name: str) -> str | None:
        """Returns the report.html of a comparison; None before it is written."""
        with suppress(OSError):
            return (self.comparisons.place(self.known(name)) / "report.html").read_text(encoding="utf-8")
        return None

    def signature(self, name: str) -> str:
        """Returns a hash of the sizes and times of a comparison's files, which changes when one of them does."""
        place = self.comparisons.place(self.known(name))
        sizes = []
        for pattern in ("runs/*/run/metrics.jsonl", "runs/*/run/dynamics.jsonl", "runs/*/result.json", "*"):
            for file in sorted(place.glob(pattern)):
                with suppress(OSError):
                    facts = file.stat()
                    sizes.append((file.name, facts.st_size, int(facts.st_mtime)))
        text = repr((sizes, self.comparisons.running(name)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    async def latest(self, name: str) -> LatestView:
        """Returns the current view of a comparison as a message, made once for all pages. Raises RequestError as
        `view`."""
        async with self._turns.setdefault(name, asyncio.Lock()):
            kept = self._views.get(name)
            if kept is not None and time.monotonic() < kept.at + FRESH:
                return kept
            now = await run_in_threadpool(self.signature, name)
            if kept is None or kept.id != now:
                view = await run_in_threadpool(self.view, name)
                kept = LatestView(now, dumps(view), view["state"] == "running", 0.0)
            kept.at = time.monotonic()
            self._views[name] = kept
            while len(self._views) > MOST_VIEWS:
                self._views.pop(next(iter(self._views)))
            return kept

    async def events(self, name: str, seen: str | None) -> AsyncGenerator[bytes, None]:
        """Yields the view of a comparison whenever its files change, until it ends, as server-sent events; comments in
        between. `seen` is the id of the last event that the page has, None without one. If the comparison vanishes, the
        last event is an error."""
        while True:
            try:
                now = await self.latest(name)
            except (RequestError, WorkError) as problem:
                yield f"event: lost\ndata: {dumps({'message': str(problem)})}\n\n".encode()
                return
            if now.id != seen:
                yield f"id: {now.id}\ndata: {now.data}\n\n".encode()
                if not now.running:
                    return
                seen = now.id
            else:
                yield b": still here\n\n"
            await asyncio.sleep(BEAT)


def _verdicts(results: Results) -> list[str]:
    sentences = [verdict_sentence(one) for one in results.verdicts]
    return [best_words(results), *sentences] if len(results.names) > 1 else sentences


def _end(run: RunResult) -> str:
    if run.validation is None:
        return run.error or run.status
    return f"held-out loss {fixed(run.validation.loss, 4)}"


def _terms(design: dict[str, Any]) -> list[Any]:
    return [design.get(name) for name in ("minutes", "tokens", "flops", "steps", "batch_size", "context")]


def _how(place: Path) -> dict[str, list[str]]:
    """Returns the command and the line of Python that make a comparison, and continue one that was stopped."""
    if (place / ASKED).is_file():
        file, out = place / ASKED, str(place)
        return {"commands": [run_command(file, "--out", out)], "python": [f"gf.run({str(file)!r}, out={out!r})"]}
    return {"commands": [run_command(place / FILE)], "python": [f"gf.run({str(place / FILE)!r})"]}


@lru_cache(maxsize=MOST_LISTED)
def _speeds(place: Path, written: int) -> list[float]:
    """Returns the FLOPs per second of the runs of a comparison whose results.json was written at a time; none for a
    damaged one."""
    with suppress(RequestError):
        found = read_results(place)
        return [run.flops_per_token * run.train.tokens_per_second for run in (found.runs if found else ())
                if run.flops_per_token and run.train and run.train.tokens_per_second]  # fmt: skip
    return []
