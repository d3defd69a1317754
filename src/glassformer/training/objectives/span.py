from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from pydantic import Field

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.text import Batch, Tokenizer, Tokens, as_file, refuse_long
from glassformer.training.objectives.base import ObjectiveConfig, Text, check_reading_on, read_by, with_end
from glassformer.training.objectives.corrupted import CorruptedBatches, CorruptedWindows
from glassformer.training.objectives.pairs import SourceLayout, refuse_other_texts

SENTINEL = "<extra_id_{}>"
"""T5's name of the token for the n-th span."""


class SpanConfig(ObjectiveConfig, kind="span"):
    """Span corruption objective (T5), to predict spans removed from a text: the mean of -log p(y_i | y_<i, x) over
    their tokens and sentinels.

    Raffel et al. 2020, 1910.10683, 3.1.4: a share `density` of n tokens is removed in spans of `mean` tokens on
    average. A separate sentinel replaces each in the source; the target has, span by span, its sentinel and its tokens.

        x = Thank you <0> me to your party <1> week </s>        y = <0> for inviting <1> last </s>

    The lengths of the spans, and of the text between them, are random divisions. The text is as long as possible while
    its source fits the context (568 tokens for 512 as published, with targets of 114). The loss is not a likelihood of
    the text, so it has no bits per byte. A model without an encoder reads x, then generates y.
    """

    values: ClassVar[tuple[str, ...]] = ("density", "mean")
    continues: ClassVar[bool] = False

    density: float = Field(0.15, gt=0, lt=1)
    """Share of the tokens that are removed."""
    mean: float = Field(3.0, ge=1, le=100)
    """Mean tokens of a span."""
    sentinels: int = Field(100, gt=0, le=10_000)
    """Maximum number of spans; the sentinels are special tokens, added to the tokenizer if missing."""

    def check(self, config: ModelConfig) -> None:
        super().check(config)
        check_reading_on(config)

    def among(self, configs: Mapping[str, ModelConfig]) -> Self:
        refuse_other_texts(self.kind, configs)
        return super().among(configs)

    def writes(self, config: ModelConfig) -> bool:
        """Returns False: removed spans are not a text to continue."""
        return False

    def with_tokens(self, text: Text) -> Text:
        """Returns the text with sentinels and an end token, which a run's folder then keeps."""
        names = [SENTINEL.format(i) for i in range(self.sentinels)]
        tokenizer = with_end(text.tokenizer)
        if all(tokenizer.id_of(name) is not None for name in names):
            return text
        return read_by(text, tokenizer.with_specials(names, {"additional_special_tokens": names}))

    def check_length(self, text: Tokens, context: int, config: ModelConfig | None = None) -> None:
        sizes = self.sizes(context, SourceLayout.of(config))
        if sizes.spans > self.sentinels:
            raise RequestError(
                f"context={context} holds {sizes.spans:,} spans, and there are {self.sentinels:,} sentinels; use a "
                "shorter context, or more of objective.sentinels",
                code="range", field="objective.sentinels", value=self.sentinels, expected=f">= {sizes.spans}",
            )  # fmt: skip
        for name, side in (("training", text.train), ("held-out", text.validation)):
            refuse_long(sizes.text, len(side), f"{name} text")

    def sizes(self, context: int, layout: SourceLayout | None = None) -> Sizes:
        """Returns the sizes of the longest text that the context holds. Raises RequestError if the context holds
        none."""
        found = None
        for tokens in range(2, 4 * context + 2):
            sizes = Sizes.of(tokens, self.density, self.mean)
            needed = (layout or SourceLayout()).length(sizes.source - 1, sizes.target - 1)
            found = sizes if needed <= context else found
        if found is None:
            raise RequestError(
                f"context={context} is too short for a span and the text around it; use 8 or more",
                code="range", field="context", value=context, expected=">= 8",
            )  # fmt: skip
        return found

    def batches(
        self, text: Tokens, batch: int, context: int, seed: int, config: ModelConfig | None = None
    ) -> CorruptedBatches:
        spans = Spans.of(self, context, text.tokenizer, SourceLayout.of(config))
        return CorruptedBatches(spans.batch, self.kind, text.train.tokens, batch, spans.sizes.text, seed)

    def evaluation(
        self, text: Tokens, context: int, max_tokens: int | None, batch: int, config: ModelConfig | None = None
    ) -> CorruptedWindows:
        spans = Spans.of(self, context, text.tokenizer, SourceLayout.of(config))
        return CorruptedWindows(spans.batch, self.kind, text, spans.sizes.text, max_tokens, batch)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a training example in tokens: the text, its removed tokens, source and target, ends included; and its
    number of spans."""

    text: int
    taken: int
    spans: int

    @classmethod
    def of(cls, tokens: int, density: float, mean: float) -> Sizes:
        taken = min(max(round(tokens * density), 1), tokens - 1)
        return cls(tokens, taken, min(max(round(taken / mean), 1), taken, tokens - taken))

    @property
    def source(self) -> int:
        return self.text - self.taken + self.spans + 1

    @property
    def target(self) -> int:
        return self.taken + self.spans + 1


@dataclass(frozen=True)
class Spans:
    """Corruption of texts for the objective of T5: removal of spans, for one vocabulary and one length."""

    sizes: Sizes
    sentinels: np.ndarray
    end: int
    layout: SourceLayout

    @classmethod
    def of(cls, how: SpanConfig, context: int, tokenizer: Tokenizer, layout: SourceLayout) -> Spans:
        known = as_file(tokenizer)
        ids = [known.id_of(SENTINEL.format(i)) for i in range(how.sentinels)]
        assert known.eos_id is not None and None not in ids
        return cls(how.sizes(context, layout), np.array(ids, np.int64), known.eos_id, layout)

    def batch(self, texts: Batch, keys: Sequence[int]) -> Batch:
        """Returns the training batch made of texts (b, s), with spans removed at random. `keys`: a random seed for each
        row."""
        rows = [self.row(row, key) for row, key in zip(texts.inputs.numpy(), keys, strict=True)]
        return self.layout.batch(rows, self.end, self.end)

    def row(self, tokens: np.ndarray, key: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source and the target, without end tokens, made of the text `tokens` (s,); `key`: random seed. A
        text starts with kept tokens and ends with a removed span."""
        draw = np.random.default_rng(key)
        taken = divided(self.sizes.taken, self.sizes.spans, draw)
        left = divided(self.sizes.text - self.sizes.taken, self.sizes.spans, draw)
        source: list[np.ndarray] = []
        target: list[np.ndarray] = []
        at = 0
        for here, gone, sentinel in zip(left, taken, self.sentinels, strict=False):
            mark = np.array([sentinel])
            source += [tokens[at : at + here], mark]
            target += [mark, tokens[at + here : at + here + gone]]
            at += here + gone
        return np.concatenate(source), np.concatenate(target)


def divided(n: int, parts: int, draw: np.random.Generator) -> np.ndarray:
    """Returns (parts,) positive numbers with sum n, drawn uniformly from all such divisions."""
    cuts = np.sort(draw.choice(n - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [n]]))
