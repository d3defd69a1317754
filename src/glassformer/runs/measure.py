"""Measures of a trained model as a RunResult: the course of training, and every measure of the model."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from typing import Any

import torch

from glassformer.dynamics.summary import summary_of
from glassformer.generation import stream
from glassformer.model import Model
from glassformer.parts.core.base import to_plain
from glassformer.runs.answers import answers
from glassformer.runs.request import sources
from glassformer.runs.results import (
    Dynamics,
    Generation,
    MachineRecord,
    Point,
    Reach,
    RunResult,
    Sample,
    TrainingResult,
    Validation,
)
from glassformer.text import Tokens
from glassformer.training import Recipe, Run, evaluate, extrapolate, frequency_loss
from glassformer.training.pace import reached

POINTS = 300
"""Maximum number of points of a curve."""
GENERATED = 120
PROMPT = 48
TEMPERATURE, TOP_K = 0.8, 40


def describe(name: str, run: Run, peak: int | None) -> RunResult:
    """Returns the result of a run after training, before its trained model is measured; `peak`: peak memory in
    bytes."""
    steps = [row for row in run.metrics if "loss" in row]
    checks = [row for row in run.metrics if "validation" in row]
    return RunResult(
        name=name,
        seed=run.recipe.seed,
        parameters=run.config.num_params(),
        parameters_without_embeddings=run.config.num_params(embeddings=False),
        flops_per_token=3 * run.config.flops(run.recipe.context),
        config=run.config.to_dict(),
        recipe=to_plain(run.recipe),
        train=TrainingResult(
            steps=run.steps,
            tokens=run.tokens,
            seconds=run.seconds,
            tokens_per_second=run.tokens_per_second,
            peak_memory_bytes=peak,
            learning_rate=run.learning_rate,
            curve=curve(steps, "tokens"),
            curve_seconds=curve(steps, "seconds"),
            rate_curve=curve(steps, "tokens", "learning_rate"),
            validation_curve=[[row["tokens"], _finite(row["validation"]["loss"])] for row in checks],
            validation_tokens=checks[-1]["validation"]["tokens"] if checks else None,
        ),
        validation=_validation(run.validation),
        generation=None,
        extrapolation=[],
        dynamics=Dynamics.of({} if run.folder is None else summary_of(run.folder)),
        machine=MachineRecord(run.how.describe()),
        sources=sources(run.config, run.recipe),
        status="ok" if run.status == "ok" else "diverged",
        error=run.error,
    )


def measured(result: RunResult, run: Run, text: Tokens, loss_alone: bool = False) -> RunResult:
    """Returns a copy of `result` with the measures of the trained model added; `loss_alone`: only its held-out loss."""
    context, objective = run.recipe.context, run.recipe.objective
    text = objective.with_tokens(text)
    found = evaluate(
        run.model, text, context, run.how, max_tokens=4 * run.recipe.evaluation_tokens, objective=objective,
        known=run.scored,
    )  # fmt: skip
    if objective.in_nats and run.config.head.predicts_tokens:
        windows = objective.evaluation(text, context, 4 * run.recipe.evaluation_tokens, 8, run.config)
        found["frequency_loss"] = frequency_loss(windows)
    if loss_alone:
        return result.changed(validation=_validation(found), loss_alone=True)
    most = reached(run.recipe)
    reach = extrapolate(run.model, text, context, run.how, most, objective) if objective.continues else []
    return result.changed(
        validation=_validation(found),
        generation=generation(run, text),
        answers=answers(run.model, text, objective, context),
        extrapolation=[Reach.of({**row, "loss": _finite(row["loss"])}) for row in reach],
    )


def generation(run: Run, text: Tokens, most: int = GENERATED) -> Generation | None:
    """Returns seconds per token (median, one stream, cached), bytes of state per token, and a sample; None for a model
    that does not generate."""
    found = write_sample(run.model, run.recipe, text, most)
    if found is None:
        return None
    sample, gaps = found
    context, per_token = run.recipe.context, sorted(gaps)[len(gaps) // 2]
    return Generation(
        tokens_per_second=1 / per_token,
        seconds_per_token=per_token,
        seconds_per_token_scatter=scatter(gaps),
        state_bytes_per_token=run.model.init_state(1, context).nbytes / context,
        sample=sample,
    )


def write_sample(
    model: Model, recipe: Recipe, text: Tokens, most: int = GENERATED
) -> tuple[Sample, list[float]] | None:
    """Returns (sample of at most `most` tokens that the model generates after held-out text, seconds of each token);
    None for a model that does not generate."""
    if not recipe.objective.writes(model.config):
        return None
    opening = recipe.objective.opening(text, max(1, min(PROMPT, recipe.context // 4)), model.config)
    prompt, source = (
        None if ids is None else torch.from_numpy(ids.astype("int64"))[None].to(model.device)
        for ids in (opening.tokens, opening.source)
    )
    assert prompt is not None
    new = max(1, min(most, recipe.context - len(opening.tokens)))
    stamps, ids = [time.perf_counter()], []
    for token in stream(model, prompt, new, TEMPERATURE, TOP_K, seed=0, source=source, stop_at_eos=False):
        ids.append(int(token))
        stamps.append(time.perf_counter())
    decode = text.tokenizer.decode
    sample = Sample(
        prompt=decode((opening.tokens if opening.source is None else opening.source).tolist()),
        text=decode([token for token in ids if token < text.tokenizer.vocab_size]),  # without ids of a padded row
        temperature=TEMPERATURE,
        top_k=TOP_K,
    )
    return sample, [b - a for a, b in itertools.pairwise(stamps)]


def scatter(timings: list[float], stretches: int = 8) -> float | None:
    """Returns the standard deviation of the medians of `stretches` equal parts of the timings: the drift of a machine
    while it measures; None with fewer than two timings in a part."""
    size = len(timings) // stretches
    if size < 2:
        return None
    return statistics.stdev(statistics.median(timings[i * size : (i + 1) * size]) for i in range(stretches))


def curve(rows: list[dict[str, Any]], axis: str, value: str = "loss") -> list[Point]:
    """Returns a curve of at most POINTS points from the rows of steps: [last `axis`, mean `value`] of groups of equally
    many steps."""
    size = max(1, -(-len(rows) // POINTS))
    pieces = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [[piece[-1][axis], _finite(sum(row[value] for row in piece) / len(piece))] for piece in pieces]


def _validation(found: dict[str, Any] | None) -> Validation | None:
    """Returns the held-out measures; None if they are missing, or the loss is not finite, which JSON cannot
    represent."""
    return None if found is None or not math.isfinite(found["loss"]) else Validation(**found)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
