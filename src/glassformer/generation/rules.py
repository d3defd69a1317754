"""What a checkpoint says of the tokens that may be written, whatever the logits are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from glassformer.introspection import in_vocabulary

__all__ = ["Rules"]


LENGTHS = ("no_repeat_ngram_size", "min_length", "min_new_tokens")
"""Fields of a generation_config.json that depend on the text so far and are not applied."""


@dataclass(frozen=True)
class Rules:
    """Fields of a generation_config.json, as `transformers` applies them to the next token.

    forced_bos_token_id   behind the token that a text begins with, where nothing else was given: the language of a
                          translation
    forced_eos_token_id   the last of the new tokens
    banned                never: those of `suppress_tokens`, and of `bad_words_ids` that are one token
    """

    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    banned: tuple[int, ...] = ()

    @classmethod
    def of(cls, generation: Mapping[str, Any]) -> Rules:
        """Of what `gf.load` gives as `generation`."""
        words = generation.get("bad_words_ids", ())
        forced = {name: generation.get(name) for name in ("forced_bos_token_id", "forced_eos_token_id")}
        never = {*(word[0] for word in words if len(word) == 1), *generation.get("suppress_tokens", ())}
        return cls(**forced, banned=tuple(sorted(never)))

    def check(self, vocab_size: int) -> None:
        """RequestError for a token that the vocabulary lacks."""
        forced = (("forced_bos_token_id", self.forced_bos_token_id), ("forced_eos_token_id", self.forced_eos_token_id))
        for field, token in (*forced, *(("banned", token) for token in self.banned)):
            if token is not None:
                in_vocabulary(token, vocab_size, "a token that is forced or banned,", field)

    def __call__(
        self, scores: Float[Tensor, "b v"], given: Sequence[int], step: int, steps: int
    ) -> Float[Tensor, "b v"]:
        """Logits or log-probabilities of new token `step`, of `steps` behind so many tokens `given` in each row."""
        if self.banned:
            scores = scores.index_fill(1, torch.tensor(self.banned, device=scores.device), -math.inf)
        if step == 0 and self.forced_bos_token_id is not None:
            begins = torch.tensor([count == 1 for count in given], device=scores.device)
            scores = torch.where(begins[:, None], forced(scores, self.forced_bos_token_id), scores)
        if step == steps - 1 and self.forced_eos_token_id is not None:
            scores = forced(scores, self.forced_eos_token_id)
        return scores


def forced(scores: Float[Tensor, "b v"], token: int) -> Float[Tensor, "b v"]:
    """Log-probabilities of a token that is certain."""
    certain = torch.full_like(scores, -math.inf)
    certain[:, token] = 0
    return certain


def search_options(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a beam search that a generation_config.json names."""
    return {name: generation[name] for name in ("length_penalty", "early_stopping") if name in generation}


def not_applied(generation: Mapping[str, Any]) -> list[str]:
    """What else it says of them, as NAME=VALUE: nothing here does that."""
    words = [word for word in generation.get("bad_words_ids", ()) if len(word) > 1]
    said = {"bad_words_ids": words} | {name: generation.get(name) for name in LENGTHS}
    return [f"{name}={value}" for name, value in said.items() if value]
