from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.parts.loss import IGNORED
from glassformer.text import Batch, FedBatch, Tokens
from glassformer.training.objectives.base import ObjectiveConfig, check_reading_on
from glassformer.training.objectives.corrupted import CorruptedBatches, CorruptedWindows


class PrefixObjectiveConfig(ObjectiveConfig, kind="prefix"):
    """Prefix objective, to continue a given prefix: the mean of -log p(x_i | x_<i) over the tokens after the prefix.

    Raffel et al. 2020, 1910.10683, 3.2.1: tokens of the prefix attend to each other, later ones to all tokens before
    (visibility `prefix`, `+prefix`). The length of a prefix is drawn for each sequence from 1 to the context. A causal
    model reads the same prefixes as any text, and is scored on the same tokens. The loss is a likelihood of the rest,
    so it has bits per byte.
    """

    values: ClassVar[tuple[str, ...]] = ("tokens",)

    tokens: int | None = Field(None, gt=0, le=1 << 28)
    """Tokens of each prefix; if None, drawn."""

    def check(self, config: ModelConfig) -> None:
        super().check(config)
        if config.encoder is not None:
            raise RequestError(
                "objective=prefix has no source, and the encoder of this model reads one; use span or infill, or a "
                "model without an encoder",
                code="conflict", field="objective", value=self.kind, expected="span",
            )  # fmt: skip
        check_reading_on(config)

    def check_length(self, text: Tokens, context: int, config: ModelConfig | None = None) -> None:
        super().check_length(text, context, config)
        if self.tokens is not None and self.tokens > context:
            raise RequestError(
                f"a prefix of {self.tokens:,} tokens leaves nothing to predict in a context of {context:,}; use a "
                "shorter one",
                code="range", field="objective.tokens", value=self.tokens, expected=f"<= {context}",
            )  # fmt: skip

    def batches(
        self, text: Tokens, batch: int, context: int, seed: int, config: ModelConfig | None = None
    ) -> CorruptedBatches:
        return CorruptedBatches(self._change(config), self.kind, text.train.tokens, batch, context, seed)

    def evaluation(
        self, text: Tokens, context: int, max_tokens: int | None, batch: int, config: ModelConfig | None = None
    ) -> CorruptedWindows:
        return CorruptedWindows(self._change(config), self.kind, text, context, max_tokens, batch, likelihood=True)

    def _change(self, config: ModelConfig | None) -> Prefixes:
        return Prefixes(self.tokens, config is not None and config.takes_prefix)


@dataclass(frozen=True)
class Prefixes:
    """Division of texts (b, s) into a prefix, which is read bidirectionally, and the rest, which is predicted."""

    length: int | None
    sees: bool
    """True if the model receives the mask of prefix tokens."""

    def __call__(self, texts: Batch, keys: Sequence[int]) -> Batch:
        inputs, targets = texts.inputs, texts.targets.clone()
        s = inputs.shape[1]
        drawn = [self.length or int(np.random.default_rng(key).integers(1, s + 1)) for key in keys]
        place, lengths = torch.arange(s), torch.tensor(drawn)[:, None]
        targets[place < lengths - 1] = IGNORED  # the last token of a prefix predicts the first token after it
        return FedBatch.of(inputs, targets, global_tokens=place < lengths) if self.sees else Batch(inputs, targets)
