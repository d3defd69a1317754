"""What a model is worth on text it has not seen."""

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
    """Mean loss in nats per token, perplexity exp(loss), and bits per byte of text, over held-out windows of
    `context` tokens that lie evenly and do not overlap. None bits per byte where the tokenizer loses text or the loss
    of the `objective` is no likelihood of it."""
    return score(model, objective.evaluation(text, context, max_tokens, batch, model.config), how, objective, groups)


@torch.no_grad()
def score(
    model: Model,
    windows: EvaluationWindows,
    how: Settings,
    objective: ObjectiveConfig = NEXT_TOKEN,
    groups: ProcessGroups = ALONE,
) -> dict[str, Any]:
    """The measures of `evaluate` over given windows, of which rank r of n reads every n-th batch; sums are in
    the order of the windows."""
    found: list[list[float]] = []
    was_training, each = model.training, iter(windows)
    model.eval()
    try:
        while some := list(islice(each, groups.layout.dp)):
            batch, counts = some[min(groups.at["dp"], len(some) - 1)]  # ranks read equally often; it may not count
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
    """Returns the entropy of the scored targets' frequencies, in nats: a predictor that sees no context has at least
    this loss on them."""
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
    """The loss at 1, 2, 4 and 8 times the training context, every length over the same tokens: stretches of the
    longest are cut into windows of each. A length the model or the text cannot serve says why."""
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
