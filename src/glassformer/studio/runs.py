"""Comparisons that the studio starts and shows: separate processes, whose files are all that is read."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shlex
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from glassformer.agents.comparisons import Comparisons
from glassformer.agents.tools import CompareTool
from glassformer.comparison.experiment import run_command
from glassformer.errors import RequestError, shown
from glassformer.figures import Axis, Series, legend, line_chart
from glassformer.names.known import CORPORA, TASKS
from glassformer.runs.request import REQUEST
from glassformer.runs.wording import best_words, verdict_sentence
from glassformer.serving.guard import Receive, Scope, Send
from glassformer.serving.streams import EventStream, Gone
from glassformer.serving.wire import dumps
from glassformer.studio.bodies import CompareRequest
from glassformer.training.progress import read_metrics

POLL = 1.0
"""Seconds between two readings of the files of a comparison."""
POINTS = 400
"""Points of a curve that are drawn."""
PING = 15
"""Readings without a change after which a comment is sent."""


class Runs:
    """Comparisons in a folder; another studio over the same folder sees the same ones."""

    def __init__(self, folder: Path) -> None:
        self.comparisons = Comparisons(folder, detached=True)

    def listed(self) -> dict[str, Any]:
        """Returns the comparisons, the latest first."""
        return {"folder": str(self.comparisons.folder), "runs": self.comparisons.listed()}

    def start(self, given: CompareRequest) -> dict[str, Any]:
        """Starts a comparison. Raises RequestError for one that is unfair, and while another one is computed."""
        tool = CompareTool(models=given.models, data=given.data, minutes=given.minutes, tokens=given.tokens,
                           seeds=given.seeds, allow_unmatched=given.allow_unmatched)  # fmt: skip
        return tool.call(self.comparisons)

    def known(self, name: str) -> str:
        """Returns a name that is listed. Raises RequestError for any other."""
        if name not in self.comparisons.names():
            raise RequestError(f"no comparison is named {shown(name)}", code="unknown", field="name", value=shown(name))
        return name

    def view(self, name: str) -> dict[str, Any]:
        """Returns the state of a comparison, its curves so far, and once all its runs have ended its verdicts.

        Raises RequestError."""
        found = self.comparisons.outcome(self.known(name))
        series = self._series(name)
        axes = Axis("Training tokens seen", unit="tokens"), Axis("Loss, nats per token")
        title = f"Training loss of {name} against tokens"
        results = self.comparisons.results_of(name) if found["state"] == "complete" else None
        design = self.comparisons.design_of(name)
        return {
            "name": name, "state": found["state"], "progress": found.get("progress", ""),
            "refused": found.get("refused", {}).get("message", ""), "similar": found["similar"],
            "runs_ended": found.get("runs_ended", len(found.get("runs", ()))),
            "figure": line_chart(series, *axes, title), "narrow": line_chart(series, *axes, title, 380, 300, False),
            "legend": legend(series),
            "verdicts": [] if results is None else [best_words(results), *map(verdict_sentence, results.verdicts)],
            "report": self.page(name) is not None, **_how(self.comparisons.folder / name, design),
        }  # fmt: skip

    def page(self, name: str) -> str | None:
        """Returns the page of a comparison; None before it is written."""
        with suppress(OSError):
            return (self.comparisons.place(self.known(name)) / "report.html").read_text(encoding="utf-8")
        return None

    def _series(self, name: str) -> list[Series]:
        """Returns a curve for each model: its seeds thin, the longest one thick."""
        curves: dict[str, list[list[tuple[float, float]]]] = {}
        for request in sorted(self.comparisons.place(name).glob(f"runs/*/{REQUEST}")):
            with suppress(OSError, ValueError, KeyError, RequestError):
                model = str(json.loads(request.read_text(encoding="utf-8"))["name"])
                rows = [row for row in read_metrics(request.parent / "run" / "metrics.jsonl") if "loss" in row]
                points = [(float(row["tokens"]), float(row["loss"])) for row in rows]
                curves.setdefault(model, []).append(points[:: 1 + len(points) // POINTS])
        return [
            Series(model, max(lines, key=len), style, thin=tuple(lines) if len(lines) > 1 else ())
            for style, (model, lines) in enumerate(curves.items())
        ]

    def signature(self, name: str) -> str:
        """Returns a text that changes when a file of a comparison does."""
        place = self.comparisons.place(self.known(name))
        sizes = []
        for file in sorted(place.glob("runs/*/run/metrics.jsonl")) + sorted(place.glob("*")):
            with suppress(OSError):
                facts = file.stat()
                sizes.append((file.name, facts.st_size, int(facts.st_mtime)))
        text = repr((sizes, self.comparisons.running(name)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    async def events(self, name: str, seen: str | None) -> AsyncIterator[bytes]:
        """Yields the view of a comparison whenever its files change, up to its end. `seen` is the id of the last event
        that a page has."""
        quiet = 0
        while True:
            now = await run_in_threadpool(self.signature, name)
            if now != seen:
                view = await run_in_threadpool(self.view, name)
                yield f"id: {now}\ndata: {dumps(view)}\n\n".encode()
                if view["state"] != "running":
                    return
                seen, quiet = now, 0
            quiet += 1
            if quiet % PING == 0:
                yield b": still here\n\n"
            await asyncio.sleep(POLL)


def _how(place: Path, design: dict[str, Any]) -> dict[str, list[str]]:
    models = design.get("models", [])
    names = list(models.values()) if isinstance(models, dict) else list(models)
    options = {name: design[name] for name in ("minutes", "tokens", "seeds") if design.get(name) is not None}
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    data = str(design.get("data", ""))
    keywords = "".join(f", {name}={value}" for name, value in options.items())
    command = ["glassformer", "compare", *map(str, names), "--data", data, *flags]
    return {
        "commands": [shlex.join(command), run_command(place / "asked.yaml")],
        "python": [f"gf.compare({list(map(str, names))}, {data!r}{keywords})"],
    }


class RunEvents(EventStream):
    """Events that end in silence when the page is closed."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        with suppress(Gone):
            await super().__call__(scope, receive, send)


def texts() -> list[str]:
    """Returns the names of texts and tasks that the library holds."""
    return [*CORPORA, *TASKS]
