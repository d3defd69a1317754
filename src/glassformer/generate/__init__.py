"""From logits to text: a prompt is read once, then one token at a time. Needs only `init_state` and `forward`.

stream, generate   rows of one length, as tensors
Engine             requests of any length, as text or tokens, that join and leave a running batch
speculate, beams   the same text in fewer passes; the likeliest text among several
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from glassformer.callable_module import make_callable
from glassformer.errors import RequestError, WorkError, check_whole
from glassformer.generate.compiled import CompiledStep
from glassformer.generate.sampling import Sampling, choose, row_generator
from glassformer.generate.steps import CHUNK, check_tokens, decode, prefill
from glassformer.model import Model
from glassformer.state import ModelState

__all__ = ["CompiledStep", "Sampling", "choose", "decode", "generate", "prefill", "stream"]


def stream(
    model: Model,
    tokens: Int[Tensor, "b s"],
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int | None = None,
    state: ModelState | None = None,
    compiled: CompiledStep | None = None,
    chunk: int = CHUNK,
    logprobs: int | None = None,
    **sampling: Any,
) -> Iterator[Any]:
    """Yields the next token of every row (b,), one step at a time. With a `state`, `tokens` go on from where it stands.

    With `logprobs`, each step is a `Chosen` instead: its `tokens` (b,), their `logprobs` (b,), and where `logprobs` is
    k > 0 the `top_ids` and `top_logprobs` (b, k) of the likeliest; in nats, of the model's own distribution.

    `sampling`: top_p, min_p, typical_p, penalties, logit_bias (`Sampling`). Row i draws from a generator of (seed, i),
    so its text does not depend on its neighbours. Raises RequestError for what cannot be generated, WorkError where
    the model's logits are not numbers."""
    check_tokens(model, tokens)
    if max_new_tokens < 1:
        raise RequestError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if logprobs is not None:
        check_whole("logprobs", logprobs, 0)
    rule = Sampling(temperature=temperature, top_k=top_k, **sampling)
    b, s = tokens.shape
    rule.check(model.embedding.weight.shape[0])
    generators = [] if rule.temperature == 0 else [row_generator(seed, row, tokens.device) for row in range(b)]
    past = tokens
    was_training = model.training
    model.eval()
    try:
        if state is None:
            state = model.init_state(b, s + max_new_tokens) if compiled is None else compiled.init_state()
        for step in range(max_new_tokens):
            with torch.inference_mode():
                if step == 0:
                    logits = prefill(model, tokens, state, chunk)
                else:
                    logits = compiled(tokens, state) if compiled else decode(model, tokens, state)
                chosen = choose(
                    logits, [rule] * b, list(past), [s] * b, generators, logprobs or 0, logprobs is not None
                )
            if bool(chosen.bad.any()):
                raise WorkError(f"the model's logits are not numbers after {past.shape[1]} tokens")
            chosen = chosen.clone()  # ordinary tensors
            token = chosen.tokens
            if rule.penalizes:
                past = torch.cat([past, token[:, None]], dim=1)
            yield token if logprobs is None else chosen
            tokens = token[:, None]
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
    **more: Any,
) -> Int[Tensor, "b t"]:
    """tokens (b, s) followed by the new ones. A row that has reached `eos_id` repeats it; all rows there, it stops.

    `more` as for `stream`, but for `logprobs`: what is returned are tokens."""
    if more.get("logprobs") is not None:
        raise RequestError("generate returns tokens alone; stream(..., logprobs=k) gives their log-probabilities")
    eos_id = eos_id if stop_at_eos else None  # without one known, nothing stops early
    new: list[Tensor] = []
    done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    for token in stream(model, tokens, max_new_tokens, temperature, top_k, seed, **more):
        if eos_id is not None:
            token = torch.where(done, eos_id, token)
            done |= token == eos_id
        new.append(token)
        if bool(done.all()):
            break
    return torch.cat([tokens, *(token[:, None] for token in new)], dim=1)


make_callable(__name__)
