"""A text whose model is observed, and edited, while it is computed, without an effect on other requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from glassformer.errors import WorkError
from glassformer.generation.engine import GenerationRequest, ruled
from glassformer.generation.sampling import Sampled, choose
from glassformer.generation.steps import decode, split_pieces
from glassformer.model import Model
from glassformer.parts.state import ModelState


class Observer(Protocol):
    """Reader, and editor, of values inside a model."""

    def watching(self) -> AbstractContextManager[None]:
        """Returns a context in which this observer sees, and may edit, the values of each pass."""

    def token(self, token: int, logits: Tensor) -> None:
        """Takes a new token and the logits (v,) that it was drawn from."""


@torch.inference_mode()
def observed(
    model: Model, asked: GenerationRequest, state: ModelState, piece: int | None, observer: Observer
) -> Iterator[Sampled | None]:
    """Yields the new tokens of a request; before them, None after each piece of its prompt except the last.

    Each pass runs by itself inside `observer.watching()`, which is left before a value is yielded. Tokens, log-
    probabilities and draws are those of a request without an observer, unless it changes values.

    Raises WorkError for logits that are not numbers."""
    tokens = torch.tensor([asked.prompt], device=model.device)
    *first, last = split_pieces(tokens, piece)
    for part in first:
        with observer.watching():
            model(part, state)
        yield None
    with observer.watching():
        logits = model(last, state)[:, -1]
    while True:
        free = logits
        if asked.rules is not None:
            logits = ruled(asked.rules, asked, logits)
        history = torch.tensor(asked.prompt + asked.tokens, device=model.device)
        found = choose(
            logits, [asked.sampling], [history], [len(asked.prompt)], [asked.generator], top=asked.top or 0,
            logprobs=asked.top is not None,
            masks=[None if asked.constraint is None else asked.constraint.allowed()],
        )  # fmt: skip
        if bool(found.bad):
            raise WorkError("the model's logits are not numbers", code="diverged")
        token = int(found.tokens)
        observer.token(token, free[0])
        yield found
        with observer.watching():
            logits = decode(model, torch.tensor([[token]], device=model.device), state)
