"""A training step and a decoding step of a model, timed on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType

from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.errors import RequestError, keeping
from glassformer.figures import seconds
from glassformer.figures.terminal import dim, size
from glassformer.planning.planned import PrintedPlan, columns
from glassformer.text import Tokens, prepare
from glassformer.training import MaskedConfig, NextTokenConfig, Recipe
from glassformer.training.objectives import ObjectiveConfig, SpanConfig
from glassformer.training.pace import StepPace, decoding_pace, paces
from glassformer.units import plural

LIMIT = 20.0
"""Seconds of timing of one model, after which no further step starts."""
STATES = 16
"""Bytes per trained parameter: weight, gradient and two moments in float32."""
LETTERS, COPIES = "ab\n", 20
"""Training text, an alphabet that every vocabulary holds, and its copies per sequence of a batch."""
OBJECTIVES: tuple[ObjectiveConfig, ...] = (NextTokenConfig(), SpanConfig(), MaskedConfig())
"""Objectives in order of preference; a model is trained by the first one that suits it."""


@dataclass(frozen=True)
class Timed(PrintedPlan):
    """Measured times of a training step of `batch` sequences of `context` tokens, and of a decoding step of the same
    batch."""

    batch: int
    context: int
    step: StepPace
    token: StepPace | None
    """Pace of decoding at the end of the context; None for a model that does not decode, or if timing was stopped
    before."""
    how: machine.Settings
    """Device, dtype and threads of training."""

    @property
    def step_seconds(self) -> float:
        """Median seconds of a training step."""
        return self.step.seconds

    @property
    def token_seconds(self) -> float | None:
        """Median seconds of a decoding step; None for a model that does not decode."""
        return None if self.token is None else self.token.seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "batch": self.batch, "context": self.context, "step_seconds": self.step_seconds,
            "step_spread": self.step.spread, "tokens_per_second": self.step.tokens_per_second,
            "token_seconds": self.token_seconds, "token_spread": self.token and self.token.spread,
            "device": self.how.device, "dtype": self.how.dtype, "threads": self.how.threads,
            "processor": str(machine.machine()["processor"]), "torch": torch.__version__,
        }  # fmt: skip

    def beside(self, *others: Timed) -> Iterator[str | RenderableType]:
        plans = (self, *others)
        table = columns("", plans)
        table.add_row("a training step", *(_spread(one.step) for one in plans))
        table.add_row("tokens a second", *(f"{one.step.tokens_per_second:,.0f}" for one in plans))
        if any(one.token is not None for one in plans):
            tokens = [one.token for one in plans]
            table.add_row("a step of decoding", *("" if one is None else _spread(one) for one in tokens))
            rates = ("" if one is None else f"{one.tokens_per_second:,.0f}" for one in tokens)
            table.add_row("tokens written a second", *rates)
        yield table
        where = str(machine.machine()["processor"]) if self.how.device == "cpu" else self.how.device
        yield dim(
            f"{where}, {self.how.threads} threads, eager, products in {self.how.dtype} in training and float32 in "
            f"decoding; medians of at most {plural(len(self.step.steps), 'step')}, with quartiles"
        )


def _spread(pace: StepPace) -> str:
    low, high = pace.spread
    return f"{seconds(pace.seconds)} ({seconds(low)} to {seconds(high)})"


def timed(
    configs: Mapping[str, ModelConfig], context: int, batch: int, whole: Callable[[dict[str, Timed]], Any] = dict
) -> Any:  # fmt: skip
    """Builds each model of `configs`, times its training and decoding steps on this machine, and returns
    `whole(plans)`, plans by name.

    Raises RequestError, before anything is built, for a model that does not fit this machine's memory. An error or
    interrupt carries the plans timed until then as `error.so_far`."""
    recipes = {}
    for name, config in configs.items():
        check_memory(name, config)
        recipes[name] = Recipe.of(
            steps=10**6, tokens=None, batch_size=batch, context=context, compile=False,
            objective=objective_of(config),
        )  # fmt: skip
    hows = {
        name: machine.settings(recipe.device, recipe.dtype, recipe.threads, False) for name, recipe in recipes.items()
    }  # fmt: skip
    steps, tokens = dict[str, StepPace](), dict[str, StepPace]()

    def made() -> Any:
        plans = {
            name: Timed(batch, context, step, tokens.get(name), hows[name], name=name) for name, step in steps.items()
        }
        return whole(plans) if plans else None

    with keeping(made):
        for name, config in configs.items():
            with tempfile.TemporaryDirectory() as folder:
                text = text_of(Path(folder), batch * (context + 1))
                paces({name: (config, recipes[name])}, text, seconds=LIMIT, found=steps)
            if config.writes:
                own, device = config.replace(context=context), hows[name].device
                decoding_pace(own, batch, context, device, seconds=LIMIT, name=name, found=tokens)
    return made()


def check_memory(
    name: str, config: ModelConfig, field: str = "here", remedy: str = "leave out here, and plan its training"
) -> None:
    """Raises RequestError, which names the `field` and the `remedy`, if the training states of the model need more
    memory than is free."""
    needed, free = STATES * config.num_params(), machine.free_memory(machine.settings().device)
    if free is not None and needed > free:
        message = (
            f"{name}: weights, gradients and the optimizer's moments take {size(needed)}, and {size(free)} are free on "
            f"this machine; {remedy}"
        )
        raise RequestError(message, code="memory", field=field, value=name, expected=f"at most {size(free)}")


def objective_of(config: ModelConfig) -> ObjectiveConfig:
    """Returns the objective of a model's timed training step. Raises RequestError if no objective suits it."""
    problem: RequestError | None = None
    for objective in OBJECTIVES:
        try:
            objective.check(config)
        except RequestError as error:
            problem = problem or error
        else:
            return objective
    assert problem is not None
    raise problem


def text_of(folder: Path, tokens: int) -> Tokens:
    """Returns a training text of few distinct characters, long enough for batches of `tokens` tokens, stored in
    `folder`."""
    path = folder / "text.txt"
    path.write_text(LETTERS * (COPIES * tokens // len(LETTERS) + 100), encoding="utf-8")
    return prepare(path, "char", cache_dir=folder)
