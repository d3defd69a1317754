from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from glassformer.dynamics.records import Records, Unwritten
from glassformer.dynamics.watch import Moment, Watch
from glassformer.training.callbacks.base import Callback
from glassformer.training.objectives import NextTokenConfig
from glassformer.training.state import Training


class Watching(Callback):
    """Callback that detects spikes of loss and gradient norm, and writes statistics of layers to dynamics.jsonl every
    `recipe.watch` steps (`dynamics.Watch`)."""

    def __init__(self, run: Training):
        self.watch = Watch(run.model, run.recipe.watch, autocast=run.how.autocast, decode=run.text.tokenizer.decode)

    def started(self, run: Training) -> None:
        self._open(run)

    def before_update(self, run: Training, moment: Moment) -> None:
        run.notice(self.watch.before_update(moment) if moment.finite else [self.watch.not_finite(moment)])
        if moment.step == 1 and run.recipe.objective == NextTokenConfig():
            self.watch.check_targets(moment)

    def after_update(self, run: Training, moment: Moment) -> None:
        self.watch.after_update(moment)
        run.seen = self.watch.latest

    def skipped(self, run: Training, moment: Moment) -> None:
        self.watch.skipped(moment)

    def evaluated(self, run: Training) -> None:
        assert run.validation is not None
        if run.moment is not None and not math.isfinite(loss := run.validation["loss"]):
            self.watch.not_finite(replace(run.moment, loss=loss))

    def rolled_back(self, run: Training, step: int) -> None:
        self._open(run)
        run.notice(self.watch.rolled_back(step, run.step))

    def ended(self, run: Training) -> None:
        if run.error is not None:
            self.watch.ended(run.step, run.error)
        if self.watch.records:
            self.watch.records.close()

    def state(self) -> dict[str, Any]:
        return {"watch": self.watch.state()}

    def restore(self, state: dict[str, Any]) -> None:
        if "watch" in state:
            self.watch.restore(state["watch"])

    def _open(self, run: Training) -> None:
        """Opens dynamics.jsonl, and removes from it the rows after the present step of the run."""
        if run.folder is not None:
            if self.watch.records:
                self.watch.records.close()
            self.watch.records = Records.open(run.folder, run.step) if run.groups.leads else Unwritten(run.folder)
