"""Beam search: the most likely texts among the `width` that are kept open at each length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from glassformer.errors import RequestError, WorkError, check_whole, keeping
from glassformer.generation.rules import Rules
from glassformer.generation.sampling import penalize_repetition
from glassformer.generation.steps import check_source, check_tokens, decode, encoded, new_state, prefill
from glassformer.introspection import at_rest
from glassformer.model import Model
from glassformer.parts.forward_pass import Memory

__all__ = ["Beam", "beams"]

LARGEST_PENALTY = 10


@dataclass(frozen=True)
class Beam:
    """New tokens of a text, its end token included, and its score: log-probability / length ** length_penalty."""

    tokens: list[int]
    score: float


def beams(
    model: Model,
    tokens: Int[Tensor, "1 s"],
    width: int,
    max_new_tokens: int = 100,
    ends: Iterable[int] | None = None,
    length_penalty: float = 1.0,
    n: int = 1,
    early_stopping: bool | Literal["never"] = False,
    dtype: torch.dtype | None = None,
    source: Int[Tensor, "1 t"] | list[list[int]] | None = None,
    rules: Rules | None = None,
    repetition_penalty: float = 1.0,
    renormalize_logits: bool = False,
) -> list[Beam]:
    """Returns the n best continuations found, best first; fewer if the search finds fewer.

    A text is complete with a token of `ends` (if None, the model's), or at max_new_tokens. After `width` texts are
    complete, the search ends at once (early_stopping=True), when no open text at its present length would beat the
    worst complete one (False), or when none would at any length that it may reach ("never"). Choices, scores and ends
    are those of `transformers`' generate(num_beams=width). `dtype` is the dtype of the decode state; `source` holds the
    token ids for the encoder, `rules` are as for `stream`. `repetition_penalty` divides the log-probabilities of tokens
    in the text as `gf.Sampling` does; `renormalize_logits` renormalises the distribution after rules and penalty.

    Raises RequestError for a request that cannot be generated, WorkError if the model's logits are not numbers. If a
    search ends early, `error.so_far` has its best beams, complete or open."""
    tokens = check_tokens(model, tokens)
    if len(tokens) != 1:
        raise RequestError(
            f"beams continue one text at a time; tokens have {len(tokens)} rows",
            code="range", field="tokens", value=len(tokens),
        )  # fmt: skip
    check_source(model, 1, None, source, None)
    for name, value in (("width", width), ("max_new_tokens", max_new_tokens), ("n", n)):
        check_whole(name, value)
    if n > width:
        raise RequestError(
            f"n={n} is more than width={width}, the number of texts kept", code="range", field="n", value=n
        )
    if not abs(length_penalty) <= LARGEST_PENALTY:
        raise RequestError(
            f"length_penalty={length_penalty} must be from {-LARGEST_PENALTY} to {LARGEST_PENALTY}",
            code="range", field="length_penalty", value=length_penalty,
        )  # fmt: skip
    if early_stopping not in (True, False, "never"):
        raise RequestError(
            f"early_stopping={early_stopping!r} must be True, False or 'never'",
            code="unknown", field="early_stopping", value=early_stopping,
        )  # fmt: skip
    rules = rules or Rules()
    rules.check(model.vocab_size)
    with at_rest(model):
        memory = None if source is None else encoded(model, source)
        ends = set(model.ends if ends is None else ends)

        reads_text = repetition_penalty != 1 or rules.reads_text

        def allowed(own: Tensor, step: int, texts: list[list[int]]) -> Tensor:
            past = [torch.cat([tokens[0], tokens.new_tensor(text)]) for text in texts] if reads_text else []
            if repetition_penalty != 1:
                own = penalize_repetition(own, repetition_penalty, past)
            own = rules(own, [tokens.shape[1]] * width, step, max_new_tokens, past, ends)
            return own.log_softmax(-1) if renormalize_logits else own

        how = ends, length_penalty, early_stopping, dtype, memory, allowed
        return _search(model, tokens, width, max_new_tokens, *how, n)[:n]


@torch.inference_mode()
def _search(
    model: Model,
    tokens: Tensor,
    width: int,
    max_new_tokens: int,
    ends: set[int],
    length_penalty: float,
    early_stopping: bool | str,
    dtype: torch.dtype | None,
    memory: Memory | None,
    allowed: Callable[[Tensor, int, list[list[int]]], Tensor],
    n: int,
) -> list[Beam]:
    room = 0 if memory is None else memory.x.shape[1]
    state = new_state(model, 1, tokens.shape[1] + max_new_tokens, dtype, memory_len=room)
    logits = prefill(model, tokens, state, memory=memory).expand(width, -1)
    state = state.repeated(new_state(model, width, state.max_len, dtype, memory_len=room))
    scores = torch.full((width,), -math.inf, device=logits.device)  # -inf: a copy of the prompt
    scores[0] = 0  # all rows hold the prompt, and only one counts
    texts: list[list[int]] = [[]] * width
    complete: list[Beam] = []
    open_beams: list[Beam] = []

    def best() -> list[Beam] | None:
        """Returns the n best beams so far, complete or open, best first; None before the first."""
        return sorted([*complete, *open_beams], key=lambda beam: -beam.score)[:n] or None

    vocab_size = logits.shape[1]
    ending = torch.tensor(sorted(ends), dtype=torch.long, device=logits.device)
    candidates = min(max(2, 1 + len(ends)) * width, width * vocab_size)  # at least `width` of them end no text
    with keeping(best):
        for length in range(1, max_new_tokens + 1):
            if not logits.max(-1).values.isfinite().all():
                raise WorkError(
                    f"the model's logits are not numbers after {tokens.shape[1] + length - 1} tokens", code="diverged"
                )
            own = logits.float().log_softmax(-1)
            total = scores[:, None] + allowed(own, length - 1, texts)
            found, index = total.flatten().topk(candidates)
            rows, new = index // vocab_size, index % vocab_size
            ended = torch.isin(new, ending) | (length == max_new_tokens)
            complete += [
                Beam([*texts[int(rows[i])], int(new[i])], float(found[i]) / length**length_penalty)
                for i in range(width)
                if ended[i] and found[i] > -math.inf
            ]
            complete = sorted(complete, key=lambda beam: -beam.score)[:width]
            scores, going = found.masked_fill(ended, -math.inf).topk(width)
            reach = max_new_tokens if early_stopping == "never" and length_penalty > 0 else length
            highest = float(scores[0]) / reach**length_penalty
            full = len(complete) == width
            if highest == -math.inf or (full and (early_stopping is True or highest <= complete[-1].score)):
                break
            rows, new = rows[going], new[going]
            texts = [[*texts[row], token] for row, token in zip(rows.tolist(), new.tolist(), strict=True)]
            open_beams = [
                Beam(text, score / length**length_penalty)
                for text, score in zip(texts, scores.tolist(), strict=True)
                if score > -math.inf
            ]
            state.reorder(rows)
            logits = decode(model, new[:, None], state)
    return complete
