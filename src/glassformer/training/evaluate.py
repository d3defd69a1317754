"""Losses on held-out text."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np
import torch

from glassformer.errors import RequestError, no_memory
from glassformer.machine import Settings
from glassformer.machine.threads import paced
from glassformer.model import Model
from glassformer.parallel.process_groups import ALONE, ProcessGroups
from glassformer.parts.loss import IGNORED
from glassformer.text import EvaluationWindows, Tokens, bits_per_byte
from glassformer.training.objectives import NextTokenConfig, ObjectiveConfig

NEXT_TOKEN = NextTokenConfig()


def evaluate(
    model: Model,
    text: Tokens,
    context: int,
    how: Settings,
    max_tokens: int = 65536,
    batch: int = 8,
    objective: ObjectiveConfig = NEXT_TOKEN,
    groups: ProcessGroups = ALONE,
) -> dict[str, Any]:
    """Returns mean loss in nats per token, perplexity exp(loss), and bits per byte of text, over held-out windows of
    `context` tokens, evenly spread without overlap. `bits_per_byte`: None if the tokenizer loses text or the loss of
    the `objective` is not a likelihood of the text."""
    return score(model, objective.evaluation(text, context, max_tokens, batch, model.config), how, objective, groups)


@torch.no_grad()
def score(
    model: Model,
    windows: EvaluationWindows,
    how: Settings,
    objective: ObjectiveConfig = NEXT_TOKEN,
    groups: ProcessGroups = ALONE,
) -> dict[str, Any]:
    """Returns the measures of `evaluate` (loss, perplexity, ...) over the given windows: rank r of n reads every n-th
    batch; sums are in the order of the windows."""
    found: list[list[float]] = []
    was_training, each = model.training, iter(windows)
    model.eval()
    try:
        while some := list(islice(each, groups.layout.dp)):
            batch, counts = some[min(groups.at["dp"], len(some) - 1)]  # all ranks read the same number of batches
            with paced(model, "evaluation", batch.inputs.numel(), free=False), how.autocast():
                losses = objective.loss(model, batch.to(how.device), reduction="none")
            scored = float((batch.targets != IGNORED).sum())
            told = groups.numbers(float(losses.cpu().double().sum()), scored, float(counts.sum()), axis="dp")
            found += told[: len(some)]
    finally:
        model.train(was_training)
    nats, tokens, size = sum(row[0] for row in found), *(int(sum(row[i] for row in found)) for i in (1, 2))
    loss = nats / tokens
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": bits_per_byte(nats, size) if size else None,
        "tokens": tokens,
    }


def frequency_loss(windows: EvaluationWindows) -> float:
    """Returns the loss in nats of a predictor that knows only the frequencies of the held-out targets: their entropy,
    the least loss possible without context."""
    targets = torch.cat([batch.targets[batch.targets != IGNORED] for batch, _ in windows])
    shares = targets.unique(return_counts=True)[1].double() / len(targets)
    return float(torch.special.entr(shares).sum())


def extrapolate(
    model: Model,
    text: Tokens,
    context: int,
    how: Settings,
    max_tokens: int = 16384,
    objective: ObjectiveConfig = NEXT_TOKEN,
) -> list[dict[str, Any]]:
    """Returns a row for each of 1, 2, 4 and 8 times the training context, with the loss at that length, over equal
    tokens: slices of the longest length are cut into windows of each length. A length that model or text do not
    support has a `reason`."""
    lengths = [times * context for times in (1, 2, 4, 8)]
    longest = max((length for length in lengths if length < len(text.validation)), default=context)
    stretches = objective.evaluation(text, longest, max(max_tokens, longest), 8, model.config).starts
    rows: list[dict[str, Any]] = []
    for length in lengths:
        try:
            windows = objective.evaluation(text, length, None, max(1, 8 * context // length), model.config)
            windows.starts = (stretches[:, None] + np.arange(0, longest, length)).ravel()
            found = score(model, windows, how, objective)
            rows.append({"context": length, "loss": found["loss"], "tokens": found["tokens"]})
        except RequestError as error:
            rows.append({"context": length, "loss": None, "reason": f"cannot: {error}"})
        except (MemoryError, RuntimeError) as error:
            if not no_memory(error):
                raise
            rows.append({"context": length, "loss": None, "reason": "cannot: out of memory at this length"})
    return rows
