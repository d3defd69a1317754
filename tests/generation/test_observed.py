"""Prompts that are read outside the batch: scored, or observed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from glassformer.generation.engine import Engine
from glassformer.generation.observed import observed
from glassformer.generation.prompt_scores import PromptScores
from tests.generation.test_engine import drain, tiny

GROWING = "llama+dynamic_ntk:4+context=64+mixer.position.scaling.original_context=16"
"""Model whose frequencies change once a text has more than 16 tokens."""
IDS = [(7 * i) % 31 for i in range(41)]


def test_scores_of_a_prompt_past_a_change_of_frequencies_are_those_of_the_whole() -> None:
    model, scores = tiny(GROWING), PromptScores()
    list(scores.read(model, IDS, model.init_state(1, 64), 8))
    with torch.inference_mode():
        log_p = model(torch.tensor([IDS[:-1]]))[0].log_softmax(-1)
    expected = log_p.gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scores.logprobs), expected)


class Kept:
    """Observer that keeps the logits of each token."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def watching(self, seen: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def token(self, token: int, logits: torch.Tensor) -> Iterator[None]:
        self.logits.append(logits)
        yield


def test_an_observed_prompt_past_a_change_of_frequencies_is_read_as_a_whole() -> None:
    model, kept = tiny(GROWING), Kept()
    engine = Engine(model, slots=1, context=64, piece=8)
    request = engine.submit(
        IDS, 1, temperature=0, own=lambda asked: observed(model, asked, model.init_state(1, 64), 8, kept)
    )
    drain(engine)
    assert request.error is None and len(request.tokens) == 1
    with torch.inference_mode():
        torch.testing.assert_close(kept.logits[0], model(torch.tensor([IDS]))[0, -1])
