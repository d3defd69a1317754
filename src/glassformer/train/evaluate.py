"""What a model is worth on text it has not seen."""

from __future__ import annotations

import math
from typing import Any

import torch

from glassformer.errors import RequestError
from glassformer.machine import Settings
from glassformer.model import Model
from glassformer.text import Tokens, bits_per_byte, evaluation_windows


@torch.no_grad()
def evaluate(
    model: Model, text: Tokens, context: int, how: Settings, max_tokens: int = 65536, batch: int = 8
) -> dict[str, Any]:
    """Mean loss in nats per token, perplexity exp(loss), and bits per byte of text, over held-out windows of
    `context` tokens that lie evenly and do not overlap."""
    windows = evaluation_windows(text.validation, context, max_tokens, token_bytes=text.token_bytes, batch=batch)
    nats, tokens, size = 0.0, 0, 0
    was_training = model.training
    model.eval()
    try:
        for inputs, targets, counts in windows:
            with how.autocast():
                losses = model.loss(inputs.to(how.device), targets.to(how.device), reduction="none")
            nats += float(losses.double().sum())
            tokens += int((targets != -100).sum())
            size += int(counts.sum())
    finally:
        model.train(was_training)
    loss = nats / tokens
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": bits_per_byte(nats, size),
        "tokens": tokens,
    }


def extrapolate(
    model: Model, text: Tokens, context: int, how: Settings, max_tokens: int = 32768
) -> list[dict[str, Any]]:
    """The loss at 1, 2, 4 and 8 times the training context; a length the model or the text cannot serve says why."""
    rows: list[dict[str, Any]] = []
    for times in (1, 2, 4, 8):
        length = times * context
        try:
            found = evaluate(model, text, length, how, max(max_tokens, length), batch=max(1, 8 // times))
            rows.append({"context": length, "loss": found["loss"], "tokens": found["tokens"]})
        except RequestError as error:
            rows.append({"context": length, "loss": None, "reason": f"cannot: {error}"})
    return rows
