"""Resources of a claim's measurement: a resumable folder, a text, seeds, and comparisons of trained models."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from glassformer.comparison import compare
from glassformer.errors import RequestError
from glassformer.figures import si
from glassformer.files import only_writer
from glassformer.laboratory.evidence.figure import Figure, sampled
from glassformer.naming import preset
from glassformer.runs import events
from glassformer.runs.arm import BETWEEN_STEPS
from glassformer.runs.events import Notify, reading, silent
from glassformer.runs.executor import Executor, Local, execute
from glassformer.runs.request import RunRequest
from glassformer.runs.results import Key, Results, RunResult
from glassformer.text import TextData, prepare
from glassformer.thresholds import CONFIDENCE
from glassformer.training import Report, Reporter, Run, train
from glassformer.training.checkpoint import latest

DATA = "python-docs"
"""Default training text; it is installed on every machine with Python."""
TOKENIZER = "char"
SEEDS = 3
POOL = "pool"
"""Folder next to the folders of claims, with runs that several claims share."""
TINY = "-tiny"
"""Suffix of the name of a folder of tiny runs."""
TINY_SEEDS = 2
TINY_CONTEXT = 8
TINY_BATCH = 2
TINY_STEPS = 2


class Text:
    """Training text of a series of claims, tokenized only once, when the first claim trains on it."""

    def __init__(self, data: str | Path | None = None, notify: Notify = silent):
        self.given, self._notify = data, notify

    @property
    def name(self) -> str:
        """Name of the text, without its folder."""
        return DATA if self.given is None else Path(self.given).name

    @cached_property
    def prepared(self) -> TextData:
        return prepare(self.given or DATA, TOKENIZER, progress=reading(self._notify))


class Pooled:
    """Executor for training runs that several claims share: each is trained once, in a folder named by a hash of its
    request without the seed."""

    def __init__(self, folder: Path, executor: Executor | None = None):
        self.folder, self.executor = folder, executor or Local()
        self.workers, self.shared, self.here = 1, False, self.executor.here

    def run(self, requests: Sequence[RunRequest], folder: Path, notify: Notify = silent) -> Iterator[RunResult]:
        for request in requests:
            place = self.folder / _decided_by(request)
            with only_writer(place):
                yield from execute([request], place, self.executor, notify)


def _decided_by(request: RunRequest) -> str:
    identity = request.identity
    tree = {**identity, "recipe": {**identity["recipe"], "seed": None}}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Compared:
    """Results of a finished comparison: its runs and losses by arm (model) and seed."""

    results: Results
    steps: int

    def runs(self, arm: str) -> dict[int, RunResult]:
        """Returns the arm's runs by seed, diverged ones included."""
        found = {run.seed: run for run in self.results.runs if run.name == arm and run.status != "failed"}
        if not found:
            raise RequestError(f"no run of {arm} has finished", code="missing", field="arm", value=arm)
        return found

    def losses(self, arm: str) -> dict[int, float]:
        """Returns {seed: held-out loss} of the arm's runs that ended well."""
        return {s: run.validation.loss for s, run in self.runs(arm).items() if run.validation and run.status == "ok"}

    def reach(self, arm: str, times: int) -> dict[int, float]:
        """Returns {seed: loss of the arm} on texts of `times` times the training context."""
        context = (self.results.budget.context or 0) * times
        return {
            seed: row.loss
            for seed, run in self.runs(arm).items()
            for row in run.extrapolation
            if row.context == context and row.loss is not None
        }

    def rise(self, arm: str, times: int) -> list[float]:
        """Returns, for each seed, how much higher the arm's loss is at `times` times the training context than at that
        context, over the same tokens."""
        near, far = self.reach(arm, 1), self.reach(arm, times)
        return [far[seed] - near[seed] for seed in sorted(near.keys() & far.keys())]

    def common(self, a: str, b: str) -> list[int]:
        """Returns the seeds for which the runs of both arms ended well."""
        return sorted(self.losses(a).keys() & self.losses(b).keys())

    def gaps(self, a: str, b: str) -> list[float]:
        """Returns the differences loss(b) - loss(a) of two arms, one for each seed that both finished."""
        left, right = self.losses(a), self.losses(b)
        return [right[seed] - left[seed] for seed in self.common(a, b)]

    def judged(self, figure: Figure, *arms: str) -> Figure:
        """Returns `figure`, a value measured on these arms; without its interval if one of their runs diverged, because
        the remaining runs are not a fair sample. The verdict then stays open."""
        return figure.model_copy(update={"low": None, "high": None}) if any(map(self.diverged, arms)) else figure

    def gap(self, a: str, b: str, **bounds: float | None) -> Figure | None:
        """Returns loss(b) - loss(a) as a measured value. Its interval is that of the comparison's verdict on the two
        arms, corrected for several arms, or else one over their common seeds; see `judged`. None if no seed finished
        both."""
        name = f"loss of {b} less that of {a}"
        for verdict in self.results.verdicts:
            same = (verdict.a, verdict.b, verdict.confidence) == (a, b, CONFIDENCE)
            if same and verdict.difference is not None:
                found = Figure(name=name, value=verdict.difference, unit="nats", low=verdict.low, high=verdict.high,
                               count=verdict.seeds, **bounds)  # fmt: skip
                return self.judged(found, a, b)
        gaps = self.gaps(a, b)
        return self.judged(sampled(name, gaps, "nats", **bounds), a, b) if gaps else None

    def diverged(self, arm: str) -> int:
        """Returns the number of an arm's runs that diverged."""
        return sum(run.status == "diverged" for run in self.runs(arm).values())

    def mean(self, arm: str) -> float:
        losses = self.losses(arm)
        return sum(losses.values()) / len(losses) if losses else float("inf")

    @property
    def size(self) -> str:
        """Scale of the comparison: "805k parameters, 400k tokens of python-docs"."""
        run = self.results.runs[0]
        tokens = max((one.train.tokens for one in self.results.runs if one.train), default=0)
        return (
            f"{si(run.parameters_without_embeddings or 0, 2)} parameters in the layers, {si(tokens, 2)} tokens "
            f"({self.steps:,} steps), context {self.results.budget.context}, {self.results.data.name}"
        )

    @property
    def sure(self) -> str:
        seeds = self.results.budget.seeds or 1
        return f"{seeds} seeds, intervals of {CONFIDENCE:.0%}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the runs that failed or diverged."""
        lost = [run for run in self.results.runs if run.status != "ok"]
        return tuple(f"{run.name} seed {run.seed} {run.status}." for run in lost)


@dataclass(frozen=True)
class Bench:
    """Workplace for the measurement of one claim: it trains models and keeps their runs.

    folder    folder of the claim's comparisons; interrupted ones resume from it
    tiny      True to run a few steps of two seeds: verdicts on trained models are then open
    seeds     seeds of each arm; if None, the claim's default
    """

    folder: Path
    text: Text
    tiny: bool = False
    seeds: int | None = None
    executor: Executor | None = None
    notify: Notify = silent

    def scaled(self, full: int, tiny: int) -> int:
        """Returns the number of repeats, or the length, of a measurement: `full`, or in a tiny one `tiny`."""
        return tiny if self.tiny else full

    def runs(self, full: int) -> range:
        """Returns the seeds of a measurement, as a range: as long as requested, or by default `full` seeds."""
        return range(self.seeds or self.scaled(full, 2))

    def compare(
        self,
        arms: Sequence[str],
        tokens: int,
        *,
        seeds: int = SEEDS,
        context: int = 256,
        batch_size: int = 16,
        **options: Any,
    ) -> Compared:
        """Trains the arms on the bench's text, each for `tokens` tokens, and returns the results; runs shared with
        other claims are reused. `options` are those of `gf.compare`."""
        seeds = self.seeds or seeds
        if self.tiny:
            seeds, context, batch_size = TINY_SEEDS, TINY_CONTEXT, TINY_BATCH
            tokens = TINY_STEPS * context * batch_size
            options = {**options, "evaluation_tokens": context}
        found = compare(
            arms,
            self.text.prepared,
            tokens=tokens,
            seeds=seeds,
            context=context,
            batch_size=batch_size,
            out=self.folder,
            executor=Pooled(self.folder.with_name(POOL), self.executor),
            progress=self.notify,
            command=f"glassformer claims {self.folder.name}",
            **options,
        )
        return Compared(found.results, -(-tokens // (context * batch_size)))

    def alone(self, *runs: Key) -> Callable[[str, int], dict[str, Any]]:
        """Announces runs, (name, seed), that are trained in this process one after the other. Returns a function from
        name and seed to the keyword arguments of `training.train` with which the run resumes and reports its
        progress."""
        tell = self.notify
        tell(events.Begin(runs=list(runs), how="in one process, one run after the other", notes=[]))

        def how(name: str, seed: int) -> dict[str, Any]:
            said, who = 0.0, {"name": name, "seed": seed}
            tell(events.Start(**who))

            def report(one: Report) -> None:
                nonlocal said
                if time.monotonic() - said > BETWEEN_STEPS or one.done >= 1:
                    said = time.monotonic()
                    now = {"step": one.step, "done": one.done, "loss": one.loss, "seconds_left": one.seconds_left}
                    tell(events.Step(**who, **now, tokens_per_second=one.tokens_per_second))

            place = self.folder / f"{name}-{seed}"
            return {"out": place, "resume": latest(place) is not None, "callbacks": [Reporter(report)]}

        return how

    def train(self, expression: str, tokens: int, seed: int, context: int, batch_size: int = 16) -> Run:
        """Trains one model in this process on the bench's text, for measurements that no comparison makes; another
        claim that asks for an equal run reuses its folder."""
        if self.tiny:
            context, batch_size = TINY_CONTEXT, TINY_BATCH
            tokens = TINY_STEPS * context * batch_size
        recipe = {"tokens": tokens, "seed": seed, "context": context, "batch_size": batch_size}
        decided = hashlib.sha256(json.dumps([expression, recipe, self.tiny]).encode()).hexdigest()[:12]
        place = self.folder.with_name(POOL) / f"run-{decided}"
        return train(preset(expression), self.text.prepared, recipe, place, latest(place) is not None)
