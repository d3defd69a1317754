"""Induction heads: when a small model learns to continue a repeated sequence, and in which heads.

A row is a block of random symbols, repeated, of another length in each row (`text/tasks.py`), so that neither
statistics of symbols nor positions help: the model learns to attend to the token after an earlier occurrence of the
current one (Olsson et al. 2022, 2209.11895).

>>> found = induction(seed=0)
>>> found.first, found.fall, found.previous, found.prefix
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.figures import Axis, Markup, Series, line_chart
from glassformer.lens.heads import head_scores
from glassformer.lens.tables import strongest
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.text import Tokens, prepare
from glassformer.text.tasks import Induction as Task
from glassformer.training import Callback, train
from glassformer.training.objectives import TaskConfig
from glassformer.training.objectives.drawn import as_tokens
from glassformer.training.state import Training

MODEL = "gpt2+layers=2+d_model=64+heads=4+rope+ffn=none+nobias+untied"
"""Expression of two layers of four attention heads, without FFN."""
LEARNED = 0.5
"""Loss in nats on repeated symbols below which repetition counts as learned; a guess costs ln 64 = 4.16."""
HIGH, LOW = 0.9, 0.1
"""Shares of a guess's loss between which the fall of the loss is measured."""
EVERY = 25
"""Steps between two evaluations."""
ROWS = 64
"""Held-out rows of an evaluation."""
HEAD_ROWS = 4


@dataclass(frozen=True)
class Look:
    """Evaluation of a model at one step: the loss in nats of repeated symbols, and the strongest heads."""

    step: int
    loss: float
    within: float
    """Loss in nats of symbols in their first occurrence."""
    previous: float
    """Largest attention to the previous token, over all heads."""
    prefix: float
    """Largest attention to the token after the previous occurrence of the current one, over all heads
    (`lens/heads.py`)."""


@dataclass(frozen=True)
class StrongestHead:
    """Attention head with the largest score of a kind, such as attention to the previous token."""

    layer: int
    head: int
    score: float


@dataclass(frozen=True)
class InductionRun:
    """Result of a training run on repeated blocks."""

    expression: str
    seed: int
    steps: int
    looks: tuple[Look, ...]
    previous: StrongestHead
    prefix: StrongestHead
    seconds: float
    guess: float
    """Loss of a guess in nats, ln(symbols)."""

    @property
    def final(self) -> float:
        return self.looks[-1].loss

    @property
    def first(self) -> int | None:
        """First evaluated step at which the model has learned the repetition; None if it never has."""
        return next((look.step for look in self.looks if look.loss < LEARNED), None)

    @property
    def fall(self) -> tuple[int | None, int | None]:
        """First steps at which the loss is below 90 % and below 10 % of a guess; None for a threshold never reached."""
        high, low = (
            next((look.step for look in self.looks if look.loss < share * self.guess), None) for share in (HIGH, LOW)
        )
        return high, low

    def share_of(self, kind: str) -> float:
        """Returns how much of the total rise of a head score, `previous` or `prefix`, occurs between the two steps of
        `fall`, as a share."""
        high, low = self.fall
        values = {look.step: getattr(look, kind) for look in self.looks}
        if high is None or low is None:
            return math.nan
        before = max((step for step in values if step < high), default=high)
        whole = max(values.values()) - min(values.values())
        return (values[low] - values[before]) / whole if whole else math.nan

    def draw(self) -> Markup:
        """Returns charts of the loss and of the head scores by step."""
        series = [
            Series("loss / ln V", [(float(look.step), look.loss / self.guess) for look in self.looks]),
            Series("previous token", [(float(look.step), look.previous) for look in self.looks], style=1),
            Series("prefix match", [(float(look.step), look.prefix) for look in self.looks], style=2),
        ]
        title = f"{self.expression}, seed {self.seed}: the loss falls when the heads form"
        return line_chart(series, Axis("step"), Axis("share", low=0.0, high=1.1, decimals=3), title)


class _Watch(Callback):
    def __init__(self, task: Task, text: Tokens):
        self.task, self.looks = task, list[Look]()
        self.batch = as_tokens(task.rows(ROWS, "looked at"), TaskConfig().ids(text))

    def started(self, run: Training) -> None:
        self.look(run.model, 0)

    def after_update(self, run: Training, moment: object) -> None:
        if (run.step + 1) % EVERY == 0:
            self.look(run.model, run.step + 1)

    def look(self, model: Model, step: int) -> None:
        repeated, fresh = losses(model, self.task, *self.batch)
        scores = {kind: _strongest(model, self.task, kind) for kind in ("previous token", "induction")}
        self.looks.append(Look(step, repeated, fresh, scores["previous token"].score, scores["induction"].score))


@torch.no_grad()
def losses(model: Model, task: Task, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """Returns a model's mean losses in nats on repeated and on new symbols: those after the longest block, all
    repeated, and those within the shortest, all new."""
    was_training = model.training
    each = F.cross_entropy(model.eval()(inputs).flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    model.train(was_training)
    return float(each[:, task.most - 1 :].mean()), float(each[:, : task.least - 1].mean())


def _strongest(model: Model, task: Task, kind: str) -> StrongestHead:
    was_training = model.training
    table = head_scores(model.eval(), task.row // 2, HEAD_ROWS, kinds=(kind,)).scores[kind]
    model.train(was_training)
    layer, head, score = strongest(table, 1)[0]
    return StrongestHead(layer, head, score)


def induction(
    expression: str = MODEL, seed: int = 0, steps: int = 600, batch: int = 32, task: Task | None = None
) -> InductionRun:
    """Trains a model on repeated blocks and evaluates it every 25 steps: ten seconds of one core with the defaults."""
    task = task or Task()
    text = prepare(str(task))
    watch = _Watch(task, text)
    run = train(
        preset(expression), text,
        {
            "steps": steps, "batch_size": batch, "context": task.length, "seed": seed, "objective": "task",
            "learning_rate": 3e-3, "weight_decay": 0.0, "threads": 1, "dtype": "float32", "compile": False,
            "schedule": {"kind": "constant", "warmup": min(100, steps // 2)}, "evaluate_every": steps,
        },
        callbacks=[watch],
    )  # fmt: skip
    previous, prefix = (_strongest(run.model, task, kind) for kind in ("previous token", "induction"))
    return InductionRun(
        expression, seed, steps, tuple(watch.looks), previous, prefix, run.seconds, math.log(task.symbols)
    )
