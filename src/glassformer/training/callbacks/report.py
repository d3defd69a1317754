from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from glassformer.training.callbacks.base import Callback
from glassformer.training.state import Training


@dataclass
class Report:
    """Report on the state of a run after a step, an evaluation, or an event."""

    step: int
    steps: int | None
    """Steps of the whole run; None if the clock bounds it."""
    tokens: int
    seconds: float
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    done: float
    """Fraction of the run that is done, 0 to 1."""
    validation: dict[str, Any] | None = None
    events: Sequence[dict[str, Any]] = ()
    """Events that the watch has found in this step, and the answers to spikes."""
    statistics: dict[str, Any] | None = None
    """Statistics that the watch has measured in this step; None if it was not due."""

    @property
    def seconds_left(self) -> float:
        return self.seconds * (1 - self.done) / self.done if self.done > 0 else math.nan


class Reporter(Callback):
    """Callback that calls the function `tell` with a `Report` after each step, evaluation and event, from the first
    step on; if several processes share a run, only the first calls it."""

    def __init__(self, tell: Callable[[Report], object]):
        self.tell = tell

    def recorded(self, run: Training, row: dict[str, Any]) -> None:
        self._report(run, row.get("validation"))

    def noticed(self, run: Training, events: Sequence[dict[str, Any]]) -> None:
        self._report(run, events=events)

    def _report(
        self, run: Training, validation: dict[str, Any] | None = None, events: Sequence[dict[str, Any]] = ()
    ) -> None:
        last = next((row for row in reversed(run.rows) if "loss" in row), None)
        if last is None or not run.groups.leads:
            return
        seen = run.seen["statistics"] if run.seen and run.seen["step"] == run.step else None
        self.tell(
            Report(
                run.step, run.steps, run.tokens, run.seconds, last["loss"], last["learning_rate"], last["grad_norm"],
                last["tokens_per_second"], run.share, validation, events, seen,
            )
        )  # fmt: skip
