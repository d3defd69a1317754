"""Seconds of a training step and of a decoding step on this machine, measured: the one stop-watch for both.

A model is built and warmed up as in a run, then some steps are timed, each with all work that a run does in a step.
Models take turns, step by step, so that other work of the machine slows all models alike; the median counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch

from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.figures.terminal import clock
from glassformer.text import Tokens
from glassformer.training.loop import FEWEST, one_step, warm_up
from glassformer.training.recipe import Recipe
from glassformer.training.request import prepare_run
from glassformer.training.state import EVALUATIONS, Training
from glassformer.units import plural

STEPS = 10
"""Timed steps of each model, unless the limit of seconds ends them before."""
FIRST = 2
"""Steps before the timed ones, because the first steps allocate the optimizer's state."""
STARTED = 2.0
"""Seconds of a run that do not depend on its size: starting its process, weights, files."""
FORWARD = 0.36
"""Time of an evaluation per token, as a share of the time of a training step per token, as measured; products take a
third."""
AT_A_CONTEXT, REACHED = 0.5, 8192
"""Tokens on which a run of a comparison measures its loss at each of four contexts, in multiples of
`evaluation_tokens`, and the largest number of them"""
AFTER = 4 + 4 * AT_A_CONTEXT
"""Tokens that a run of a comparison evaluates after training, in multiples of `evaluation_tokens`: at the end, and at
four contexts"""
PASSES = EVALUATIONS + AFTER
"""Tokens that a run of a comparison evaluates in all, in multiples of `evaluation_tokens`"""
SURE = 4096
"""Tokens of an evaluation that suffice for the figures of a short run; the last one reads four times that number"""
EVALUATED = 0.1
"""Largest share of a budget of minutes that evaluations take beyond it, and of the training of a compared run that
those take which no verdict reads: in its course and at several contexts."""
AFFORDED = 0.02
"""Share of the training of a compared run that evaluations after it take, unless they read fewer than `SURE` tokens."""
ENOUGH = 200
"""Number of steps that a run with a budget of minutes should have: its batch is made smaller until it has them, or
`SMALLEST` sequences."""
SMALLEST = 4
"""Smallest batch, in sequences, that is chosen for a run without a given batch_size; also the batch of the timed
steps."""
DECIDED = ("batch_size", "evaluation_tokens")
"""Fields of a recipe that are chosen to fit a budget of minutes, if the user does not give them."""


@dataclass(frozen=True)
class StepPace:
    """Measured times of one model's steps of one kind, training or decoding.

    Attributes
    ----------
    steps : tuple of float
        Seconds of each timed step.
    tokens : float
        Tokens that a step reads, or writes when decoding.
    """

    steps: tuple[float, ...]
    tokens: float

    @property
    def seconds(self) -> float:
        """Median seconds of a step."""
        return median(self.steps)

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile of the seconds of a step."""
        if len(self.steps) < 2:
            return self.seconds, self.seconds
        low, _, high = quantiles(self.steps, n=4, method="inclusive")
        return low, high

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def evaluated(recipe: Recipe, text: Tokens) -> int:
    """Returns the number of tokens that all evaluations of a run read: about eight evaluations during training, each on
    `evaluation_tokens`, and one at the end on four times that number, each at most the held-out text."""
    held = len(text.validation)
    return EVALUATIONS * min(recipe.evaluation_tokens, held) + min(4 * recipe.evaluation_tokens, held)


def spared(run: Training) -> int:
    """Returns the number of evaluations in the course of a run of known length, from `FEWEST` to `EVALUATIONS`, whose
    seconds with those at several contexts are at most `EVALUATED` of its training."""
    if run.steps is None:
        return EVALUATIONS
    held, usual = len(run.text.validation), run.recipe.evaluation_tokens
    at_context = min(held, max(reached(run.recipe), 8 * run.recipe.context))  # at least one text of the longest
    paid = EVALUATED * run.steps * run.batches.tokens_per_step / FORWARD - 4 * at_context
    return max(FEWEST, min(EVALUATIONS, int(paid / max(1, min(usual, held)))))


def reached(recipe: Recipe) -> int:
    """Returns the held-out tokens on which a run of a comparison measures its loss at each of four contexts."""
    return min(int(AT_A_CONTEXT * recipe.evaluation_tokens), REACHED)


def affordable(tokens: int, usual: int) -> int:
    """Returns the tokens of one evaluation of a compared run that trains on `tokens` tokens: those whose evaluations
    after training take `AFFORDED` of its training, from `SURE` to `usual`. At `SURE`, the held-out text differs less
    than the seeds do."""
    return max(min(usual, SURE), min(usual, int(AFFORDED * tokens / (FORWARD * AFTER))))


def run_seconds(tokens: float, tokens_per_second: float, evaluated: float) -> float:
    """Returns the seconds of a whole run: its start, training on `tokens` tokens, evaluation on `evaluated` tokens."""
    return STARTED + (tokens + FORWARD * evaluated) / tokens_per_second


def decided(
    models: Mapping[str, tuple[ModelConfig, Recipe]], text: Tokens, free: Collection[str]
) -> tuple[dict[str, int], float]:
    """Times some steps of models with a budget of minutes, and chooses the fields of `DECIDED` that are `free`.

    Returns
    -------
    dict, float
        Field -> its value for the recipe of every model: the largest batch of at most the recipe's with `ENOUGH` steps
        in the budget, and held-out tokens whose evaluations take `EVALUATED` of it; tokens/s of the slowest model.
    """
    recipe = next(iter(models.values()))[1]
    assert recipe.minutes is not None
    shrinks = "batch_size" in free and recipe.objective.continues and recipe.micro_batch is None
    timed = {"batch_size": min(SMALLEST, recipe.batch_size)} if shrinks else {}
    small = {name: (config, own.replace(**timed)) for name, (config, own) in models.items()}
    speed = min(pace.tokens_per_second for pace in paces(small, text, steps=3, seconds=3 * recipe.minutes).values())
    tokens, fields = 60 * recipe.minutes * speed, {}
    if shrinks:
        batch = recipe.batch_size
        while batch > SMALLEST and tokens < ENOUGH * batch * recipe.context:
            batch = max(SMALLEST, batch // 2)
        fields["batch_size"] = batch
    if "evaluation_tokens" in free:
        windows = max(4, int(EVALUATED * tokens / (FORWARD * PASSES) / recipe.context))
        fields["evaluation_tokens"] = min(recipe.evaluation_tokens, windows * recipe.context)
    return fields, speed


def outlook(recipe: Recipe, tokens_per_second: float, starting: float | None = None, runs: int = 1) -> str:
    """Returns a sentence on what to expect of runs with a budget of minutes: their steps, and the time beyond training.

    starting      seconds of a process until it trains; None if they are not known
    runs          number of runs, one after the other"""
    assert recipe.minutes is not None
    trained = 60 * recipe.minutes
    tokens = trained * tokens_per_second
    beyond = FORWARD * PASSES * recipe.evaluation_tokens / tokens_per_second
    steps = max(1, round(tokens / recipe.tokens_per_step))
    known = "" if starting is None else f" ({clock(starting)})"
    each = trained + beyond + (starting or 0.0)
    total = "" if starting is None else f": about {clock(runs * each)} in all"
    return (
        f"about {plural(steps, 'step')} of {recipe.batch_size} x {recipe.context} tokens "
        f"at {tokens_per_second:,.0f} tokens/s in {clock(trained)} of training; not counted: starting{known}, "
        f"evaluations on {recipe.evaluation_tokens:,} held-out tokens (up to {clock(beyond)}), texts that it "
        f"writes{total}"
    )


def paces(
    models: Mapping[str, tuple[ModelConfig, Recipe]], text: Tokens, *, steps: int = STEPS,
    seconds: float | None = None, found: dict[str, StepPace] | None = None,
) -> dict[str, StepPace]:  # fmt: skip
    """Times training steps of models, in turn.

    Parameters
    ----------
    models
        Name -> config and recipe. The vocabulary is the config's, padded to the text's.
    text
        Tokens to train on.
    steps
        Timed steps of each model.
    seconds
        Limit of the time for all models, which are timed at least once each. If None, no limit.
    found
        The dict that is returned, filled step by step, so that it holds what was timed if the work ends early.

    Returns
    -------
    dict of str to StepPace

    Raises
    ------
    RequestError
        If a model cannot be trained by its recipe on this text.
    """
    began = time.perf_counter()
    runs: dict[str, Training] = {}
    for name, (config, recipe) in models.items():
        request = prepare_run(config, text, recipe, vocab_size=config.vocab_size)
        machine.apply(request.how)
        runs[name] = Training(request)
        warm_up(runs[name])
    due = None if seconds is None else began + seconds
    found = {} if found is None else found
    calls = {name: partial(one_step, run) for name, run in runs.items()}
    for name, taken in _in_turn(calls, steps, due):
        _add(found, name, taken, runs[name].batches.tokens_per_step)
    return found


def decoding_pace(
    config: ModelConfig, batch: int, context: int, device: str = "cpu", *, steps: int = STEPS,
    seconds: float | None = None, name: str = "", found: dict[str, StepPace] | None = None,
) -> StepPace:  # fmt: skip
    """Times decoding steps in float32: one token for each of `batch` sequences, at the end of `context` tokens.

    `found[name]` is updated after every timed step, so that the caller has the pace so far if the work ends early."""
    began = time.perf_counter()
    model = config.build(seed=0).to(device).eval()
    token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    with torch.no_grad():
        if model.encoder is None:
            state = model.init_state(batch, context)
        else:
            state = model.init_state(batch, context, memory_len=context)
            model(token, state, source=token.expand(batch, context))

    @torch.no_grad()
    def step() -> None:
        state.seek(context - 1)
        model(token, state)
        machine.synchronize(device)

    due = None if seconds is None else began + seconds
    found = {} if found is None else found
    for _, taken in _in_turn({name: step}, steps, due):
        _add(found, name, taken, batch)
    return found[name]


def _add(found: dict[str, StepPace], name: str, seconds: float, tokens: float) -> None:
    """Adds a timed step of `seconds` and `tokens` to the record `found[name]` of the model `name`; creates the record
    if missing."""
    before = found[name].steps if name in found else ()
    found[name] = StepPace((*before, seconds), tokens)


def _in_turn(
    runs: Mapping[str, Callable[[], Any]], steps: int, due: float | None
) -> Iterator[tuple[str, float]]:  # fmt: skip
    """Calls the functions in turn, `FIRST` times untimed and then `steps` times, and yields (name, seconds) of each
    timed call. After the time `due` only enough turns follow that each function has one untimed call, because a first
    call can take twenty times as long as others, and one timed call."""
    counted = False
    for turn in range(FIRST + steps):
        late = due is not None and time.perf_counter() > due
        if late and counted:
            break
        counted = turn >= FIRST or (late and turn > 0)
        for name, call in runs.items():
            began = time.perf_counter()
            call()
            if counted:
                yield name, time.perf_counter() - began
