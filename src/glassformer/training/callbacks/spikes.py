from __future__ import annotations

from typing import Any

from glassformer.dynamics.watch import Moment
from glassformer.training import checkpoint
from glassformer.training.callbacks.base import Callback
from glassformer.training.progress import ROLL_BACKS
from glassformer.training.state import Training


class SpikePolicy(Callback):
    """Callback that reacts to a spike of the loss or gradient norm as `recipe.on_spike` says. go_on takes the step;
    skip leaves it out; roll_back returns to the latest checkpoint and leaves out the batches up to the spike
    (Chowdhery et al. 2022, 2204.02311, section 5.1), or skips the step before the first checkpoint and after
    `ROLL_BACKS` returns."""

    def __init__(self, run: Training):
        self.run = run
        self.times = 0

    def before_update(self, run: Training, moment: Moment) -> None:
        if not run.events or run.recipe.on_spike == "go_on":
            return
        if run.recipe.on_spike == "skip" or not self._roll_back(run, moment):
            run.skip()

    def _roll_back(self, run: Training, moment: Moment) -> bool:
        """Restores the run from its latest checkpoint and returns True; if the run cannot return to one, does nothing
        and returns False."""
        run.finish_saving()
        found = None if run.folder is None else checkpoint.latest(run.folder)
        if self.times == ROLL_BACKS or found is None:
            return False
        batch, times, seconds = run.step + run.shift, self.times + 1, run.seconds
        run.restore(found)
        run.shift, self.times, run.seconds = batch + 1 - run.step, times, seconds
        run.went_back(moment.step)
        return True

    def state(self) -> dict[str, Any]:
        return {"shift": self.run.shift, "rolled_back": self.times}

    def restore(self, state: dict[str, Any]) -> None:
        self.run.shift, self.times = state["shift"], state["rolled_back"]
