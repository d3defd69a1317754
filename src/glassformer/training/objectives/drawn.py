"""Batches of rows of a task (`text/tasks.py`), drawn for each step without repetition."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from glassformer.errors import RequestError
from glassformer.parts.loss import IGNORED
from glassformer.text import Batch, EvaluationBatch, EvaluationWindows, Tokens
from glassformer.text.tasks import TASKS, Regression, Rows, Task, TokenTask, task_of

Make = Callable[[Rows], Batch]

DRAWN = 1 << 16
"""Default number of tokens (or vectors) in all held-out rows."""


def symbols_in(text: Tokens) -> TokenTask:
    """Returns the symbol task that generates a text's rows. Raises RequestError for a text without a symbol task."""
    task = _task_in(text)
    if not isinstance(task, TokenTask):
        raise _other(task, "task", TokenTask)
    return task


def vectors_in(text: Tokens) -> Regression:
    """Returns the vector task that generates a text's rows. Raises RequestError for a text without a vector task."""
    task = _task_in(text)
    if not isinstance(task, Regression):
        raise _other(task, "regression", Regression)
    return task


def _task_in(text: Tokens) -> Task | None:
    return None if text.train.task is None else task_of(text.train.task)


def _other(task: Task | None, objective: str, kind: type) -> RequestError:
    names = " or ".join(name for name, known in TASKS.items() if issubclass(known, kind))
    what = "is not a task" if task is None else f"is {task.kind}"
    return RequestError(
        f"objective={objective} draws the rows of a task, and this data {what}; give --data {names}",
        code="conflict", field="data", value=None if task is None else str(task), expected=names,
    )  # fmt: skip


def check_row(task: Task, context: int) -> None:
    """Raises RequestError if a row of the task is longer than the context."""
    if task.length > context:
        raise RequestError(
            f"a row of {task} has {task.length:,} places, and the context is {context:,}; use --context {task.length}",
            code="range", field="context", value=context, expected=f">= {task.length}",
        )  # fmt: skip


class DrawnBatches:
    """Training batches of a task whose rows are drawn at random: `batches[step]` is a pure function of (seed, step,
    rank)."""

    def __init__(self, task: Task, make: Make, batch: int, seed: int, rank: int = 0, world: int = 1):
        self.task, self.make, self.batch, self.seed, self.rank, self.world = task, make, batch, seed, rank, world

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.task.length * self.world

    @property
    def steps_per_epoch(self) -> None:
        return None

    def read(self, steps: int) -> dict[str, int]:
        return {"tokens": steps * self.tokens_per_step}

    def __getitem__(self, step: int) -> Batch:
        return self.make(self.task.rows(self.batch, "training", self.seed, step, self.rank))


class DrawnWindows(EvaluationWindows):
    """Held-out rows of a task, equal at every call. Targets have no bytes, because they are not text."""

    def __init__(self, task: Task, make: Make, max_tokens: int | None, batch: int):
        self.rows = task.rows(max(1, (max_tokens or DRAWN) // task.length), "held out")
        self.make, self.batch, self.starts = make, batch, np.arange(len(self.rows.inputs))

    def __iter__(self) -> Iterator[EvaluationBatch]:
        for first in range(0, len(self.starts), self.batch):
            batch = self.make(Rows(*(field[first : first + self.batch] for field in self.rows)))
            yield EvaluationBatch(batch, torch.zeros(batch.targets.shape, dtype=torch.int64))

    def __len__(self) -> int:
        return math.ceil(len(self.starts) / self.batch)


def as_tokens(rows: Rows, ids: np.ndarray) -> Batch:
    """Returns rows of symbols as a batch; `ids`: the token of each symbol."""
    targets = np.where(rows.asked, ids[rows.targets], IGNORED)
    return Batch(torch.from_numpy(ids[rows.inputs]), torch.from_numpy(targets))


def as_vectors(rows: Rows) -> Batch:
    """Returns rows of vectors as a batch."""
    targets = np.where(rows.asked, rows.targets, IGNORED)
    return Batch(torch.from_numpy(rows.inputs).float(), torch.from_numpy(targets).float())
