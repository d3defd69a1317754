from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from pydantic import Field

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.text import Batch, Tokenizer, Tokens, refuse_long, with_special_token
from glassformer.training.objectives.base import ObjectiveConfig, Text, check_reading_on, read_by, with_end
from glassformer.training.objectives.corrupted import CorruptedBatches, CorruptedWindows
from glassformer.training.objectives.masked import NEW_MASK
from glassformer.training.objectives.pairs import SourceLayout, refuse_other_texts

ENDS_SENTENCE = (".", "!", "?", "\n")


class InfillConfig(ObjectiveConfig, kind="infill"):
    """Infilling objective, to reconstruct a corrupted text: the mean of -log p(x_i | x_<i, source) over the tokens of
    the text and its end.

    Lewis et al. 2019, 1910.13461 (BART): the sentences are put in a random order (`permute`), then spans whose lengths
    are drawn from a Poisson distribution of mean `mean` are each replaced by one mask token, until a share `p` of the
    tokens is hidden; a span of length 0 inserts a mask. So the model also predicts the length of each gap. A sentence
    ends with a token that ends in . ! ? or a line end. Most of the target is in the source, so the loss is not a
    likelihood of the text and has no bits per byte. A model without an encoder reads the source, then generates the
    text.
    """

    values: ClassVar[tuple[str, ...]] = ("p", "mean")
    continues: ClassVar[bool] = False
    one_length: ClassVar[bool] = False

    p: float = Field(0.3, gt=0, lt=1)
    """Share of the tokens that are hidden."""
    mean: float = Field(3.0, ge=1, le=100)
    """Mean tokens of a span."""
    permute: bool = True
    """True if the sentences of the source are in a random order."""

    def check(self, config: ModelConfig) -> None:
        super().check(config)
        check_reading_on(config)

    def among(self, configs: Mapping[str, ModelConfig]) -> Self:
        refuse_other_texts(self.kind, configs)
        return super().among(configs)

    def writes(self, config: ModelConfig) -> bool:
        """Returns False: a text is reconstructed, not continued."""
        return False

    def with_tokens(self, text: Text) -> Text:
        """Returns the text with a mask token and an end token added, which a run's folder then keeps."""
        tokenizer = text.tokenizer
        if tokenizer.eos_id is not None and tokenizer.mask_id is not None:
            return text
        tokenizer = with_end(tokenizer)
        masked = tokenizer if tokenizer.mask_id is not None else with_special_token(tokenizer, "mask_token", NEW_MASK)
        return read_by(text, masked)

    def check_length(self, text: Tokens, context: int, config: ModelConfig | None = None) -> None:
        for name, side in (("training", text.train), ("held-out", text.validation)):
            refuse_long(self.size(context, config), len(side), f"{name} text")

    def size(self, context: int, config: ModelConfig | None) -> int:
        """Returns the number of tokens of a text that fits the context, which holds the source, at most equally long,
        and the text with its end."""
        found = context - 1 if SourceLayout.of(config).encoder else (context - 1) // 2
        if found < 2:
            raise RequestError(
                f"context={context} is too short for a text and what is left of it; use 8 or more",
                code="range", field="context", value=context, expected=">= 8",
            )  # fmt: skip
        return found

    def batches(
        self, text: Tokens, batch: int, context: int, seed: int, config: ModelConfig | None = None
    ) -> CorruptedBatches:
        change = Infilling.of(self, text.tokenizer, SourceLayout.of(config)).batch
        return CorruptedBatches(change, self.kind, text.train.tokens, batch, self.size(context, config), seed)

    def evaluation(
        self, text: Tokens, context: int, max_tokens: int | None, batch: int, config: ModelConfig | None = None
    ) -> CorruptedWindows:
        change = Infilling.of(self, text.tokenizer, SourceLayout.of(config)).batch
        return CorruptedWindows(change, self.kind, text, self.size(context, config), max_tokens, batch)


@dataclass(frozen=True)
class Infilling:
    """Corruption of texts for the infilling objective: order of sentences and masked spans, for one vocabulary."""

    how: InfillConfig
    mask_id: int
    end: int
    ends: np.ndarray
    """Boolean array (v,), True for tokens that end a sentence."""
    layout: SourceLayout

    @classmethod
    def of(cls, how: InfillConfig, tokenizer: Tokenizer, layout: SourceLayout) -> Infilling:
        assert tokenizer.mask_id is not None and tokenizer.eos_id is not None
        texts = (tokenizer.decode([token]) for token in range(tokenizer.vocab_size))
        ends = np.array([text.rstrip(" ").endswith(ENDS_SENTENCE) for text in texts])
        ends[tokenizer.eos_id] = True
        return cls(how, tokenizer.mask_id, tokenizer.eos_id, ends, layout)

    def batch(self, texts: Batch, keys: Sequence[int]) -> Batch:
        """Returns the training batch made of texts (b, s): each is corrupted at random as the source. `keys`: a random
        seed for each row."""
        rows = [(self.row(row, key), row) for row, key in zip(texts.inputs.numpy(), keys, strict=True)]
        return self.layout.batch(rows, self.end, self.end)

    def row(self, tokens: np.ndarray, key: int) -> np.ndarray:
        """Returns the corrupted source of tokens (s,), at most s tokens; `key`: random seed."""
        draw = np.random.default_rng(key)
        if self.how.permute:
            sentences = np.split(tokens, np.flatnonzero(self.ends[tokens[:-1]]) + 1)
            tokens = np.concatenate([sentences[i] for i in draw.permutation(len(sentences))])
        hidden = self.spans(max(1, round(self.how.p * len(tokens))), draw)
        # The remaining tokens are divided at random among the places before, between and after the spans.
        left = len(tokens) - sum(hidden)
        cuts = np.sort(draw.integers(left + 1, size=len(hidden)))
        source: list[np.ndarray] = []
        at, before = 0, 0
        for span, cut in zip(hidden, cuts.tolist(), strict=True):
            source += [tokens[at : at + cut - before], np.array([self.mask_id])]
            at, before = at + cut - before + span, cut
        return np.concatenate([*source, tokens[at:]])

    def spans(self, count: int, draw: np.random.Generator) -> list[int]:
        """Returns the lengths of spans to mask, drawn from the Poisson distribution until their sum is `count`, the
        last one cut; at most `count` spans."""
        found: list[int] = []
        missing = count
        while missing:
            length = min(int(draw.poisson(self.how.mean)), missing)
            if length == 0 and len(found) + missing >= count:
                continue  # each span inserts one mask, so more spans would make the source longer
            found.append(length)
            missing -= length
        return found
