"""Protocol of callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from glassformer.dynamics.watch import Moment
from glassformer.errors import RequestError
from glassformer.training.state import Training


class Callback:
    """Hooks of a training run; a subclass overrides some of them, and `gf.train(..., callbacks=[...])` calls them.

    A hook may read the run and the moment (step, loss, gradient norm, batch, model, optimizer), change the model in
    place, or act on the run: `run.stop(reason)` ends it as diverged, `run.skip()` in `before_update` omits the step.
    A value that the next step depends on belongs into `state`, so that a resumed run is equal bit for bit.

    Examples
    --------
    >>> class Curve(gf.Callback):
    ...     def __init__(self):
    ...         self.losses = []
    ...
    ...     def after_update(self, run, moment):
    ...         self.losses.append(moment.loss)
    >>> curve = Curve()
    >>> run = gf.train("llama@0.3m", "tiny.txt", steps=3, batch_size=2, context=16, callbacks=[curve], progress=False)
    >>> len(curve.losses)
    3
    """

    def started(self, run: Training) -> None:
        """Runs before the first step, with the model built or restored.

        Parameters
        ----------
        run
            The run: model, optimizer, step, rows, folder.
        """

    def around_backward(self, run: Training) -> AbstractContextManager[Any]:
        """Returns a context manager inside which the run computes the loss of a step and its gradients.

        Parameters
        ----------
        run
            The run: model, optimizer, step, rows, folder.

        Returns
        -------
        context manager
            The context.
        """
        return nullcontext()

    def before_update(self, run: Training, moment: Moment) -> None:
        """Runs before the optimizer moves the weights, with the gradients of the loss.

        Parameters
        ----------
        run
            The run: model, optimizer, step, rows, folder.
        moment
            Step, loss, gradient norm and batch of the step.
        """

    def after_update(self, run: Training, moment: Moment) -> None:
        """Runs after the optimizer has moved the weights.

        Parameters
        ----------
        run
            The run: model, optimizer, step, rows, folder.
        moment
            Step, loss, gradient norm and batch of the step.
        """

    def skipped(self, run: Training, moment: Moment) -> None:
        """Runs for a step that was omitted: the weights do not move.

        Parameters
        ----------
        run
            The run: model, optimizer, step, rows, folder.
        moment
            Step, loss, gradient norm and batch of the step.
        """

    def noticed(self, run: Training, events: Sequence[dict[str, Any]]) -> None:
        """Runs when the watch has found spikes of loss or gradient norm, and when the run was rolled back.

        Parameters
        ----------
        run
            The run: model, optimizer, step, rows, folder.
        events
            Spikes and roll-backs, as rows of events.
        """

    def recorded(self, run: Training, row: dict[str, Any]) -> None:
        """Runs after a row of metrics.jsonl, of a step or an evaluation, was added to `run.rows`.

        Parameters
        ----------
        run
            The run: model, optimizer, step, rows, folder.
        row
            The row.
        """

    def evaluated(self, run: Training) -> None:
        """Runs after an evaluation on held-out text, with its measures in `run.validation`.

        Parameters
        ----------
        run
            The run: model, optimizer, step, rows, folder.
        """

    def saved(self, run: Training, folder: Path) -> None:
        """Runs after a checkpoint was written; with `async_save`, before the next one or at the end.

        Parameters
        ----------
        run
            The run: model, optimizer, step, rows, folder.
        folder
            Folder of the checkpoint.
        """

    def rolled_back(self, run: Training, step: int) -> None:
        """Runs after the run has returned from a step to its latest checkpoint, that of `run.step`.

        Parameters
        ----------
        run
            The run: model, optimizer, step, rows, folder.
        step
            Step before the return.
        """

    def ended(self, run: Training) -> None:
        """Runs after the last step: the run is finished, has diverged (`run.error`), or an exception was raised.

        Parameters
        ----------
        run
            The run: model, optimizer, step, rows, folder.
        """

    def state(self) -> dict[str, Any]:
        """Returns the callback's state, the values that the next step depends on, in a form that JSON can hold.

        Returns
        -------
        dict
            The values; the same type is given to `restore`.
        """
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the callback's state: the values that `state` returned when the checkpoint was written.

        Parameters
        ----------
        state
            The values, as JSON holds them.
        """


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raises RequestError for a value that is not a callback, such as a plain function."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            message = f"callbacks: {callback!r} is not a training.Callback; wrap a function in training.Reporter(f)"
            raise RequestError(message, code="type", field="callbacks", value=callback, expected="training.Callback")
