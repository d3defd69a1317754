"""The protocol of callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from glassformer.dynamics.watch import Moment
from glassformer.errors import RequestError
from glassformer.training.state import Training


class Callback:
    """Hooks of a training run; a subclass overrides those it needs. `gf.train(..., callbacks=[...])` calls them in the
    order of the list.

    A hook may look at the run and the moment (step, loss, gradient norm, batch, model, optimizer), change the model in
    place, or act on the run: `run.stop(reason)` ends it as diverged, `run.skip()` in `before_update` leaves the step
    out. Whatever the next step depends on belongs into `state`, so that a resumed run goes on bit for bit.

    >>> class Freeze(Callback):
    ...     def before_update(self, run, moment):
    ...         run.model.embedding.weight.grad = None
    """

    def started(self, run: Training) -> None:
        """The model is built or restored; no step has been taken since."""

    def around_backward(self, run: Training) -> AbstractContextManager[Any]:
        """A context that is entered while the loss of a step and its gradients are computed."""
        return nullcontext()

    def before_update(self, run: Training, moment: Moment) -> None:
        """Gradients are as the loss left them; the weights have not moved."""

    def after_update(self, run: Training, moment: Moment) -> None:
        """The weights have moved."""

    def skipped(self, run: Training, moment: Moment) -> None:
        """The step was left out: the weights have not moved, and will not."""

    def noticed(self, run: Training, events: Sequence[dict[str, Any]]) -> None:
        """The watch has found spikes, or the run was rolled back."""

    def recorded(self, run: Training, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl was added to `run.rows`: of a step or of an evaluation."""

    def evaluated(self, run: Training) -> None:
        """The model was evaluated on held-out text; the measures are in `run.validation`."""

    def saved(self, run: Training, folder: Path) -> None:
        """A checkpoint was written to `folder`; with `async_save` this is called before the next one, or at the end."""

    def rolled_back(self, run: Training, step: int) -> None:
        """The run has gone back from `step` to its latest checkpoint, that of `run.step`."""

    def ended(self, run: Training) -> None:
        """No step follows: the run is finished, has diverged (`run.error`), or an exception passes."""

    def state(self) -> dict[str, Any]:
        """What the next step depends on, as JSON can hold it."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where `state()` was taken."""


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raises RequestError for one that is no callback, such as a plain function."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            message = f"callbacks: {callback!r} is no training.Callback; wrap a function in training.Reporter(f)"
            raise RequestError(message, code="type", field="callbacks", value=callback, expected="training.Callback")
