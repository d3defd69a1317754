from __future__ import annotations

import math
from collections import deque
from typing import Any

from glassformer.dynamics.watch import Moment
from glassformer.thresholds import DIVERGENCE_NATS, DIVERGENCE_WINDOW
from glassformer.training.callbacks.base import Callback
from glassformer.training.progress import LEFT_OUT
from glassformer.training.state import Training


class Divergence(Callback):
    """Callback that ends a run whose loss climbs, or is not finite if such steps are not skipped."""

    def __init__(self) -> None:
        self.first_loss: float | None = None
        self.best = math.inf
        """Lowest mean loss of a window."""
        self.recent: deque[float] = deque(maxlen=DIVERGENCE_WINDOW)
        self.left_out = 0
        """Number of consecutive steps with a loss or gradient that is not finite."""

    def before_update(self, run: Training, moment: Moment) -> None:
        if moment.finite or (run.recipe.on_spike != "go_on" and self.left_out < LEFT_OUT):
            return
        last = f"; last loss {self.recent[-1]:.4f}" if self.recent else ""
        what, value = ("gradient norm", moment.grad_norm) if math.isfinite(moment.loss) else ("loss", moment.loss)
        run.stop(f"the {what} became {value} at step {moment.step}{last}")

    def after_update(self, run: Training, moment: Moment) -> None:
        self.left_out = 0
        self.recent.append(moment.loss)
        self.first_loss = moment.loss if self.first_loss is None else self.first_loss
        if len(self.recent) == DIVERGENCE_WINDOW:
            mean = sum(self.recent) / DIVERGENCE_WINDOW
            self.best = min(self.best, mean)
            self._stop_if_climbed(run, mean, DIVERGENCE_WINDOW, moment.step)

    def skipped(self, run: Training, moment: Moment) -> None:
        self.left_out = 0 if moment.finite else self.left_out + 1

    def evaluated(self, run: Training) -> None:
        assert run.validation is not None
        if not math.isfinite(loss := run.validation["loss"]):
            run.stop(f"the held-out loss became {loss} after step {run.step}")
        elif run.share >= 1 and not math.isfinite(self.best):  # in a run shorter than a window, its later half counts
            later = list(self.recent)[len(self.recent) // 2 :]
            if later:
                self._stop_if_climbed(run, sum(later) / len(later), len(later), run.step)

    def _stop_if_climbed(self, run: Training, mean: float, steps: int, step: int) -> None:
        assert self.first_loss is not None
        lowest = min(self.best, self.first_loss)
        if run.recipe.objective.in_nats and mean > lowest + DIVERGENCE_NATS:
            run.stop(
                f"the loss diverged: the mean of the last {steps} steps is {mean:.3f}, more than {DIVERGENCE_NATS:g} "
                f"nat above the lowest before, {lowest:.3f}, at step {step}"
            )

    def state(self) -> dict[str, Any]:
        return {
            "first_loss": self.first_loss,
            "best": self.best if math.isfinite(self.best) else None,
            "recent": list(self.recent),
            "left_out": self.left_out,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.first_loss, self.left_out = state["first_loss"], state["left_out"]
        self.best = math.inf if state["best"] is None else state["best"]
        self.recent = deque(state["recent"], maxlen=DIVERGENCE_WINDOW)
