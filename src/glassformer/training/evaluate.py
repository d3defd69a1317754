"""Losses on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
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
from glassformer.text import EvaluationBatch, EvaluationWindows, Tokens, bits_per_byte
from glassformer.training.objectives import NextTokenConfig, ObjectiveConfig

NEXT_TOKEN = NextTokenConfig()


@dataclass(frozen=True)
class Scored:
    """Sums over held-out windows that start at the tokens `starts`: nats, scored targets and their bytes."""

    starts: frozenset[int]
    nats: float
    tokens: int
    bytes: int

    def measures(self) -> dict[str, Any]:
        """Returns the measures of `evaluate`."""
        loss = self.nats / self.tokens
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": bits_per_byte(self.nats, self.bytes) if self.bytes else None,
            "tokens": self.tokens,
        }


def evaluate(
    model: Model,
    text: Tokens,
    context: int,
    how: Settings,
    max_tokens: int = 65536,
    batch: int = 8,
    objective: ObjectiveConfig = NEXT_TOKEN,
    groups: ProcessGroups = ALONE,
    known: Scored | None = None,
) -> dict[str, Any]:
    """Returns mean loss in nats per token, perplexity exp(loss), and bits per byte of text, over held-out windows of
    `context` tokens, evenly spread without overlap. `bits_per_byte`: None if the tokenizer loses text or the loss of
    the `objective` is not a likelihood of the text. `known`: sums of the same weights over some of the windows, which
    are not read again."""
    windows = objective.evaluation(text, context, max_tokens, batch, model.config)
    return scored(model, windows, how, objective, groups, known).measures()


def scored(
    model: Model,
    windows: EvaluationWindows,
    how: Settings,
    objective: ObjectiveConfig = NEXT_TOKEN,
    groups: ProcessGroups = ALONE,
    known: Scored | None = None,
) -> Scored:
    """Returns the sums over the given windows: those `known`, if the loss of a window does not depend on the others,
    and then those of the rest."""
    starts = frozenset(windows.starts.tolist())
    if known is None or not objective.continues or not known.starts < starts:
        return Scored(starts, *_sums(model, windows, how, objective, groups))
    windows.starts = windows.starts[~np.isin(windows.starts, list(known.starts))]
    nats, tokens, size = _sums(model, windows, how, objective, groups)
    return Scored(starts, known.nats + nats, known.tokens + tokens, known.bytes + size)


def score(
    model: Model, windows: Iterable[EvaluationBatch], how: Settings, objective: ObjectiveConfig = NEXT_TOKEN
) -> dict[str, Any]:
    """Returns the measures of `evaluate` (loss, perplexity, ...) over the given windows."""
    return Scored(frozenset(), *_sums(model, windows, how, objective, ALONE)).measures()


@torch.no_grad()
def _sums(
    model: Model, windows: Iterable[EvaluationBatch], how: Settings, objective: ObjectiveConfig, groups: ProcessGroups
) -> tuple[float, int, int]:
    """Returns the nats, scored targets and bytes of windows: rank r of n reads every n-th batch; sums are in the order
    of the windows."""
    found: list[list[float]] = []
    was_training, each = model.training, iter(windows)
    model.eval()
    try:
        while some := list(islice(each, groups.layout.dp)):
            batch, counts = some[min(groups.at["dp"], len(some) - 1)]  # all ranks read the same number of batches
            with paced(model, "evaluation", batch.inputs.numel(), free=False), how.autocast():
                losses = objective.loss(model, batch.to(how.device), reduction="none")
            targets = float((batch.targets != IGNORED).sum())
            told = groups.numbers(float(losses.cpu().double().sum()), targets, float(counts.sum()), axis="dp")
            found += told[: len(some)]
    finally:
        model.train(was_training)
    nats, tokens, size = (sum(row[i] for row in found) for i in range(3))
    return nats, int(tokens), int(size)


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
