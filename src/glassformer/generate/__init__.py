"""From logits to text: prefill once, then one token at a time. Needs only `init_state` and `forward` of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassformer.callable_module import make_callable
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.state import ModelState

__all__ = ["choose", "generate", "stream"]


def stream(
    model: Model,
    tokens: Int[Tensor, "b s"],
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int | None = None,
    state: ModelState | None = None,
) -> Iterator[Int[Tensor, "b"]]:
    """Yields the next token of every row, one step at a time. With a `state`, `tokens` go on from where it stands.

    Raises RequestError for what cannot be generated."""
    check(model, tokens, max_new_tokens, temperature, top_k)
    generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        if state is None:
            state = model.init_state(tokens.shape[0], tokens.shape[1] + max_new_tokens)
        for step in range(max_new_tokens):
            with torch.no_grad():
                logits = model(tokens, state)[:, -1]
                tokens = choose(logits, temperature, top_k, generator)[:, None]
            yield tokens[:, 0]
            if step + 1 == max_new_tokens:
                return
    finally:
        model.train(was_training)


def generate(
    model: Model,
    tokens: Int[Tensor, "b s"],
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int | None = None,
    stop_at_eos: bool = True,
    eos_id: int | None = None,
) -> Int[Tensor, "b t"]:
    """tokens (b, s) followed by the new ones. A row that has reached `eos_id` repeats it; all rows there, it stops."""
    eos_id = eos_id if stop_at_eos else None  # without one known, nothing stops early
    new: list[Tensor] = []
    done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    for token in stream(model, tokens, max_new_tokens, temperature, top_k, seed):
        if eos_id is not None:
            token = torch.where(done, eos_id, token)
            done |= token == eos_id
        new.append(token)
        if bool(done.all()):
            break
    return torch.cat([tokens, *(token[:, None] for token in new)], dim=1)


def choose(
    logits: Float[Tensor, "b v"], temperature: float, top_k: int | None = None, generator: Any = None
) -> Int[Tensor, "b"]:
    """The most likely token at temperature 0, else one drawn from softmax(logits / temperature)."""
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits.float()
    logits = (logits - logits.max(-1, keepdim=True).values) / max(temperature, 1e-6)  # the largest is 0, never 0/0
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def check(model: Model, tokens: Tensor, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if tokens.dim() != 2 or tokens.numel() == 0:
        raise RequestError(
            f"tokens must be (batch, length) with at least one token in each row, and are {tuple(tokens.shape)}"
        )
    if max_new_tokens < 1:
        raise RequestError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if not 0 <= temperature < float("inf"):
        raise RequestError(f"temperature={temperature} must be 0 or above")
    if top_k is not None and top_k < 1:
        raise RequestError(f"top_k={top_k} must be at least 1")
    visibilities = (getattr(layer.mixer, "visibility", None) for layer in model.layers)
    if not all(visibility is None or visibility.causal for visibility in visibilities):
        raise RequestError("this model sees both ways; it cannot write on from left to right")
    vocab_size = model.embedding.weight.shape[0]
    for token in (int(tokens.max()), int(tokens.min())):
        if not 0 <= token < vocab_size:
            raise RequestError(f"token {token} is outside the vocabulary of {vocab_size}")


make_callable(__name__)
