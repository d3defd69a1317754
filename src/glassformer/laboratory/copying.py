"""Copying: which mixers can ignore noise (Gu and Dao 2023, 2312.00752, 4.1.1), and recall distant tokens.

>>> copying("mamba+layers=2+d_model=64").accuracy, copying("gpt2+layers=2+d_model=64+heads=4+s4").accuracy
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.loss import IGNORED
from glassformer.text import prepare
from glassformer.text.tasks import SelectiveCopy, TokenTask
from glassformer.training import Run, train
from glassformer.training.objectives import TaskConfig

HELD_OUT = 512
"""Held-out rows on which a model is evaluated."""
GROUP = 64
"""Rows of one forward pass."""


@dataclass(frozen=True)
class Copying:
    """Result of a model trained on the task of selective copying."""

    expression: str
    seed: int
    steps: int
    accuracy: float
    """Share of the symbols that are copied correctly."""
    whole: float
    """Share of the rows with every symbol correct."""
    loss: float
    guess: float
    """Accuracy of guessing, 1 / symbols."""
    seconds: float


def copying(
    expression: str, seed: int = 0, steps: int = 2_000, batch: int = 64, learning_rate: float = 3e-3,
    task: SelectiveCopy | None = None, rows: int = HELD_OUT, **how: Any,
) -> Copying:  # fmt: skip
    """Trains a model on the task of selective copying, with rows drawn for each step, and evaluates it on `rows`
    held-out rows. `how`: further arguments of `training.train`, such as `out` and `callbacks`."""
    task = task or SelectiveCopy()
    run = taught(expression, task, seed, steps, batch, learning_rate, **how)
    right, whole, loss = answered(run.model, task, rows)
    return Copying(expression, seed, steps, right, whole, loss, 1 / task.symbols, run.seconds)


def taught(
    expression: str, task: TokenTask, seed: int, steps: int, batch: int, learning_rate: float = 3e-3, **how: Any
) -> Run:
    """Trains a model on rows of a task, drawn for each step, and returns the run."""
    return train(
        preset(expression), prepare(str(task)),
        {
            "steps": steps, "batch_size": batch, "context": task.length, "seed": seed, "objective": "task",
            "learning_rate": learning_rate, "weight_decay": 0.0, "threads": 1, "dtype": "float32",
        },
        **how,
    )  # fmt: skip


@torch.no_grad()
def answered(model: Model, task: TokenTask, rows: int, first: int = 0) -> tuple[float, float, float]:
    """Evaluates a model on held-out rows of a task, from index `first` on. Returns (share of symbols correct, share of
    rows correct, loss)."""
    objective, text = TaskConfig(), prepare(str(task))
    model.eval()
    right, losses = [], []
    for batch, _ in objective.evaluation(text, task.length, rows * task.length, GROUP):
        asked = batch.targets != IGNORED
        asked[:, :first] = False
        found = model(batch.inputs).argmax(-1) == batch.targets
        right.append(found[asked].view(len(found), -1).float())
        losses.append(float(objective.loss(model, batch)))
    each = torch.cat(right)
    return float(each.mean()), float(each.amin(1).mean()), sum(losses) / len(losses)
