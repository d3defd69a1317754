"""A text whose model is observed, and edited, while it is computed, without an effect on other requests."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from glassformer.errors import WorkError
from glassformer.generation.engine import GenerationRequest, ruled
from glassformer.generation.native_step import native_step
from glassformer.generation.sampling import Sampled, choose
from glassformer.generation.steps import PieceReader, prefill, split_pieces, warn_crossing
from glassformer.model import Model
from glassformer.parts.state import ModelState


class Observer(Protocol):
    """Reader, and editor, of values inside a model."""

    def watching(self, seen: bool) -> AbstractContextManager[None]:
        """Returns a context in which this observer may edit the values of a pass, or of some of its layers, and sees
        them if `seen`: the pass gives a token."""

    def token(self, token: int, logits: Tensor) -> Iterator[None]:
        """Takes a new token and the logits (v,) that it was drawn from; yields after each part of the work."""


@torch.inference_mode()
def observed(
    model: Model, asked: GenerationRequest, state: ModelState, piece: int | None, observer: Observer
) -> Iterator[Sampled | None]:
    """Yields the new tokens of a request; before each, None after every layer of a piece of its prompt or of the token
    before, and after every part of the observer's work. A model that cannot be read by layers reads a piece at once.

    Passes run inside `observer.watching`, which is left before a value is yielded. Tokens, log-probabilities and draws
    are those of a request without an observer, unless it changes values.

    Raises WorkError for logits that are not numbers."""
    tokens = torch.tensor([asked.prompt], device=model.device)
    settled = model.settled
    *first, last = split_pieces(tokens, piece, settled)
    for part in first:
        yield from _pass(model, part, state, observer, False)
    logits = yield from _pass(model, last, state, observer, True)
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
        yield from observer.token(token, free[0])
        yield found
        after = torch.tensor([[token]], device=model.device)
        warn_crossing(settled, state, 1)
        logits = yield from _pass(model, after, state, observer, True)


def _pass(
    model: Model, tokens: Tensor, state: ModelState, observer: Observer, seen: bool
) -> Generator[None, None, Tensor]:
    """Reads tokens (1, s) into `state`, and yields after each layer. Returns the logits (1, v) of the next token."""
    with observer.watching(seen):
        whole = native_step(model, state, tokens.shape[1]) is not None  # nothing is seen or edited
    if whole:
        return prefill(model, tokens, state)
    if not model.reads_by_layer:
        with observer.watching(seen):
            return model(tokens, state)[:, -1]
    reader = PieceReader(model, tokens, state)
    while not whole:
        with observer.watching(seen):
            whole = reader.read(lambda: True)
        yield
    if not seen:
        return tokens.new_zeros(0)  # they are of no use
    with observer.watching(seen):
        return reader.logits()
