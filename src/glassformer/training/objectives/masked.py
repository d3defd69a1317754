from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.parts.loss import IGNORED
from glassformer.text import Batch, FileTokenizer, Tokenizer, Tokens, with_special_token
from glassformer.training.objectives.base import ObjectiveConfig, Text, read_by
from glassformer.training.objectives.corrupted import CorruptedBatches, CorruptedWindows

NEW_MASK = "<mask>"
"""Mask token added to a tokenizer without one."""


class MaskedConfig(ObjectiveConfig, kind="masked"):
    """Masked objective, to predict hidden tokens from all the others: the mean of -log p(x_i | x with some hidden) over
    the hidden tokens.

    Devlin et al. 2018, 1810.04805: a share `p` of the tokens is chosen, again for every batch (RoBERTa, 1907.11692): 80
    % become the mask token, 10 % a random token, 10 % stay. Special tokens are not chosen; at least one token of a
    sequence is. With `span` they are chosen in spans of geometric length (SpanBERT, Joshi et al. 2019, 1907.10529), and
    a span is replaced as a whole. The loss is not a likelihood of the text, so it has no bits per byte.
    """

    values: ClassVar[tuple[str, ...]] = ("p", "span")

    p: float = Field(0.15, gt=0, lt=1)
    """Share of the tokens that are to be predicted."""
    span: float = Field(1.0, ge=1, le=100)
    """Mean tokens of a span; 1 for single tokens."""
    mask: float = Field(0.8, ge=0, le=1)
    """Share of the chosen tokens that become the mask token."""
    random: float = Field(0.1, ge=0, le=1)
    """Share of the chosen tokens that become a random token."""
    token: str | None = None
    """Mask token; if None, the tokenizer's, or a new one if it lacks one."""

    @model_validator(mode="after")
    def _shares(self) -> MaskedConfig:
        if self.mask + self.random > 1:
            raise ValueError(f"mask={self.mask} and random={self.random} are more than the whole")
        return self

    one_sided: bool = False
    """True if a causal model may learn the objective from only the tokens before a hidden one, for a comparison with a
    bidirectional model."""

    def check(self, config: ModelConfig) -> None:
        super().check(config)
        if config.encoder is not None:
            raise RequestError(
                "objective=masked gives a model one text, and the encoder of this one reads another; use "
                "span or infill",
                code="conflict", field="objective", value=self.kind, expected="span",
            )  # fmt: skip
        if config.causal and not self.one_sided:
            raise RequestError(
                "objective=masked needs a bidirectional model, and this one is causal: it cannot read what "
                "follows a mask; use an encoder such as bert, +bidirectional, or objective next_token",
                code="causal", field="objective", value=self.kind, expected="next_token",
            )  # fmt: skip

    def among(self, configs: Mapping[str, ModelConfig]) -> Self:
        """Returns the objective for a comparison of models, {name: config}. If some are causal and some bidirectional,
        `one_sided` is set in it, so that causal models may predict hidden tokens from only the tokens before. Raises
        RequestError if a model cannot learn the objective."""
        found = self
        if len({config.causal for config in configs.values()}) > 1:
            found = self.replace(one_sided=True)
        for config in configs.values():
            found.check(config)
        return found

    def with_tokens(self, text: Text) -> Text:
        """Returns the text with a tokenizer that has a mask token, which a run's folder then keeps."""
        tokenizer = text.tokenizer
        if self.token is not None:
            return self._named(text, self.token)
        if tokenizer.mask_id is not None:
            return text
        return read_by(text, with_special_token(tokenizer, "mask_token", NEW_MASK))

    def _named(self, text: Text, token: str) -> Text:
        known = text.tokenizer
        if not isinstance(known, FileTokenizer) or known.id_of(token) is None:
            raise RequestError(
                f"objective.token={token!r} is not in the {known.kind} tokenizer of {known.vocab_size:,} tokens; name "
                "its mask token, or leave it out for a new one",
                code="unknown", field="objective.token", value=token, expected="a token of the tokenizer",
            )  # fmt: skip
        return replace(text, tokenizer=known.with_special("mask_token", token))

    def batches(
        self, text: Tokens, batch: int, context: int, seed: int, config: ModelConfig | None = None
    ) -> CorruptedBatches:
        hide = Masking.of(self, text.tokenizer).batch
        return CorruptedBatches(hide, self.kind, text.train.tokens, batch, context, seed)

    def evaluation(
        self, text: Tokens, context: int, max_tokens: int | None, batch: int, config: ModelConfig | None = None
    ) -> CorruptedWindows:
        hide = Masking.of(self, text.tokenizer).batch
        return CorruptedWindows(hide, self.kind, text, context, max_tokens, batch)


@dataclass(frozen=True)
class Masking:
    """Corruption of texts for the masked objective: choice and replacement of hidden tokens, for one vocabulary."""

    how: MaskedConfig
    mask_id: int
    vocab_size: int
    special: np.ndarray
    """Ids (i,) of special tokens, which are never chosen."""

    @classmethod
    def of(cls, how: MaskedConfig, tokenizer: Tokenizer) -> Masking:
        assert tokenizer.mask_id is not None
        return cls(how, tokenizer.mask_id, tokenizer.vocab_size, np.array(sorted(tokenizer.special_ids), np.int64))

    def batch(self, texts: Batch, keys: Sequence[int]) -> Batch:
        """Returns the training batch made of texts (b, s), in which some tokens are hidden. `keys`: a random seed for
        each row."""
        rows = [self.row(row, key) for row, key in zip(texts.inputs.numpy(), keys, strict=True)]
        hidden, targets = (torch.from_numpy(np.stack(side)) for side in zip(*rows, strict=True))
        return Batch(hidden, targets)

    def row(self, tokens: np.ndarray, key: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs (s,) and targets (s,) of tokens (s,); targets are -100 except at chosen tokens. `key`: random
        seed."""
        draw = np.random.default_rng(key)
        free = ~np.isin(tokens, self.special)
        if not free.any():  # only special tokens: one may be chosen, because a mean over no targets is NaN
            free[:] = True
        chosen, fate = self._tokens(free, draw) if self.how.span == 1 else self._spans(free, draw)
        hidden = np.where(chosen & (fate < self.how.mask), self.mask_id, tokens)
        drawn = chosen & (fate >= self.how.mask) & (fate < self.how.mask + self.how.random)
        hidden = np.where(drawn, draw.integers(self.vocab_size, size=len(tokens)), hidden)
        return hidden, np.where(chosen, tokens, IGNORED)

    def _tokens(self, free: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Chooses single tokens of a row to predict. Returns booleans (s,), True for chosen ones, and numbers (s,) in
        [0, 1) that decide their replacement."""
        chosen = (draw.random(len(free)) < self.how.p) & free
        if not chosen.any():
            chosen[draw.choice(np.flatnonzero(free))] = True
        return chosen, draw.random(len(free))

    def _spans(self, free: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Chooses spans of tokens to predict, exactly a share `p` of the tokens. Returns booleans and numbers as
        `_tokens` does, with one number per span."""
        left = max(1, round(self.how.p * int(free.sum())))
        chosen, fate = np.zeros(len(free), bool), np.zeros(len(free))
        while left:
            start = draw.choice(np.flatnonzero(free & ~chosen))
            stretch = np.arange(start, min(start + draw.geometric(1 / self.how.span), len(free)))
            taken = stretch[(free & ~chosen)[stretch]][:left]
            chosen[taken], fate[taken] = True, draw.random()
            left -= len(taken)
        return chosen, fate
