"""Rules of a checkpoint on the tokens that may be generated, whatever the logits are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassformer.introspection import in_vocabulary

__all__ = ["Rules"]


@dataclass(frozen=True)
class Rules:
    """Fields of a generation_config.json, as `transformers` applies them to the next token."""

    forced_bos_token_id: int | None = None
    """New token that follows a prompt of a single token, such as the language of a translation; None forces none."""
    forced_eos_token_id: int | None = None
    """Last token of a text that reaches the largest length; None forces none."""
    banned: tuple[int, ...] = ()
    """Tokens that are never generated (`suppress_tokens`)."""
    banned_first: tuple[int, ...] = ()
    """Tokens banned as the first new token (`begin_suppress_tokens`), or as the second if the first is forced."""
    words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that are never completed (`bad_words_ids`); a token that ends a text is always allowed."""
    no_repeat_ngram_size: int = 0
    """Length n of the sequences that no text, prompt included, may have twice; 0 allows repetition."""
    min_length: int = 0
    """Least number of tokens of a text, prompt included."""
    min_new_tokens: int = 0
    """Least number of new tokens."""

    @classmethod
    def of(cls, generation: Mapping[str, Any]) -> Rules:
        """Returns the rules in the settings of a generation_config.json (`Loaded.generation`)."""
        return cls(
            forced_bos_token_id=generation.get("forced_bos_token_id"),
            forced_eos_token_id=generation.get("forced_eos_token_id"),
            no_repeat_ngram_size=generation.get("no_repeat_ngram_size", 0),
            min_length=generation.get("min_length", 0),
            min_new_tokens=generation.get("min_new_tokens", 0),
            banned=tuple(sorted({*generation.get("suppress_tokens", ())})),
            banned_first=tuple(sorted({*generation.get("begin_suppress_tokens", ())})),
            words=tuple(map(tuple, generation.get("bad_words_ids", ()))),
        )

    @property
    def reads_text(self) -> bool:
        """True if a rule depends on the tokens so far, not only on their number."""
        return bool(self.no_repeat_ngram_size) or any(len(word) > 1 for word in self.words)

    def check(self, vocab_size: int) -> None:
        """Raises RequestError for a token that the vocabulary lacks."""
        for field in ("forced_bos_token_id", "forced_eos_token_id"):
            if (token := getattr(self, field)) is not None:
                in_vocabulary(token, vocab_size, "a token that is forced,", field)
        for token in {*self.banned, *self.banned_first, *(one for word in self.words for one in word)}:
            in_vocabulary(token, vocab_size, "a token that is banned,", "banned")

    def __call__(
        self,
        scores: Float[Tensor, "b v"],
        given: Sequence[int],
        step: int,
        steps: int,
        texts: Sequence[Int[Tensor, "_"]] = (),
        ends: Collection[int] = (),
    ) -> Float[Tensor, "b v"]:
        """Returns the logits or log-probabilities of new token `step` (of at most `steps`) under these rules.

        `given` is the number of prompt tokens of each row; `texts` holds each row's tokens so far, read only if
        `reads_text`. A text ends at a token of `ends`."""
        first = 1 if self.forced_bos_token_id is not None else 0
        rows = []
        for row, count in enumerate(given):
            never = {*self.banned}
            if step == (first if count == 1 else 0):
                never.update(self.banned_first)
            if step < self.min_new_tokens or count + step < self.min_length:
                never.update(ends)
            text = texts[row].tolist() if self.reads_text else []
            for *before, last in self.words:
                if (before or last not in ends) and text[len(text) - len(before) :] == before:
                    never.add(last)
            rows.append(never | repeating(text, self.no_repeat_ngram_size))
        if any(rows):
            barred = torch.zeros_like(scores, dtype=torch.bool)
            for row, never in enumerate(rows):
                barred[row, list(never)] = True
            scores = scores.masked_fill(barred, -math.inf)
        if step == 0 and self.forced_bos_token_id is not None:
            begins = torch.tensor([count == 1 for count in given], device=scores.device)
            scores = torch.where(begins[:, None], forced(scores, self.forced_bos_token_id), scores)
        if step == steps - 1 and self.forced_eos_token_id is not None:
            scores = forced(scores, self.forced_eos_token_id)
        return scores


def repeating(text: Sequence[int], n: int) -> set[int]:
    """Returns the tokens that would complete a sequence of n tokens which the text already has; empty if n is 0."""
    if n < 1:
        return set()
    last = text[len(text) - n + 1 :]
    return {text[i + n - 1] for i in range(len(text) - n + 1) if text[i : i + n - 1] == last}


def forced(scores: Float[Tensor, "b v"], token: int) -> Float[Tensor, "b v"]:
    """Returns log-probabilities of the shape of `scores`: 0 for `token`, -inf for all others."""
    certain = torch.full_like(scores, -math.inf)
    certain[:, token] = 0
    return certain


def search_options(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a generation_config.json that are arguments of `beams`: name -> value."""
    names = ("length_penalty", "early_stopping", "repetition_penalty", "renormalize_logits")
    return {name: generation[name] for name in names if name in generation}


def not_applied(generation: Mapping[str, Any], beams: int | None, drafts: bool) -> list[str]:
    """Returns the settings of a generation_config.json that a way of decoding does not apply, as NAME=VALUE.

    `beams` is the width of a beam search (None for sampling), `drafts` True for speculative decoding."""
    names = ["do_sample"] if beams else ["num_beams"]
    said = {name: generation.get(name) for name in names if generation.get(name) not in (None, False, 0, 1)}
    if drafts:
        rules, none = Rules.of(generation), Rules()
        said |= {name: value for name, value in vars(rules).items() if value != getattr(none, name)}
    return [f"{name}={value}" for name, value in said.items()]
