from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.parts.loss import IGNORED
from glassformer.text import Batch, EvaluationBatch, EvaluationWindows, Tokenizer, Tokens
from glassformer.text.languages import BETWEEN
from glassformer.text.permutation import keyed, permute
from glassformer.training.objectives.base import ObjectiveConfig, check_causal


class Seq2seqConfig(ObjectiveConfig, kind="seq2seq"):
    """A target from its source: the mean of -log p(y_i | y_<i, x) over the tokens of the targets and their ends.

    Sutskever et al. 2014, 1409.3215; Vaswani et al. 2017, 1706.03762. Each document of the data is a pair, its source
    and its target with a tab between. Both end with the tokenizer's end, with which a target begins too. A batch pads
    sources behind documents of their own, and targets with what is not scored. Label smoothing is the head's.
    """

    compares: ClassVar[bool] = False

    def check(self, config: ModelConfig) -> None:
        if config.encoder is None:
            raise RequestError(
                "objective=seq2seq gives a source to an encoder, and this model has none; use transformer, or "
                "objective next_token",
                code="conflict", field="objective", value=self.kind, expected="a model with an encoder",
            )  # fmt: skip
        super().check(config)
        check_causal(config)

    def check_length(self, text: Tokens, context: int) -> None:
        for name, side in (("training", text.train), ("held-out", text.validation)):
            found = Pairs(side.tokens, text.tokenizer)
            if (longest := found.longest) > context:
                raise RequestError(
                    f"a source or target of the {name} text has {longest:,} tokens with its end; the context is "
                    f"{context:,}",
                    code="range", field="context", value=context, expected=f"at least {longest}",
                )  # fmt: skip

    def batches(self, text: Tokens, batch: int, context: int, seed: int) -> PairBatches:
        return PairBatches(Pairs(text.train.tokens, text.tokenizer), batch, seed)

    def evaluation(self, text: Tokens, context: int, max_tokens: int | None, batch: int) -> PairWindows:
        return PairWindows(Pairs(text.validation.tokens, text.tokenizer), max_tokens, batch)

    def loss(self, model: Model, batch: Batch, reduction: str = "mean") -> Tensor:
        assert isinstance(batch, PairBatch)
        return model.loss(
            batch.inputs, batch.targets, reduction=reduction, source=batch.source,
            source_documents=batch.source_documents,
        )  # fmt: skip


class PairBatch(Batch):
    """inputs and targets (b, s) as of any batch; source (b, t) and the documents of its tokens, 0 for padding."""

    source: Tensor
    source_documents: Tensor

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor, source: Tensor, source_documents: Tensor) -> PairBatch:
        made = cls(inputs, targets)
        made.source, made.source_documents = source, source_documents
        return made

    def pieces(self, size: int) -> Iterator[tuple[Batch, float]]:
        sources = zip(self.source.split(size), self.source_documents.split(size), strict=True)
        for (piece, share), of_source in zip(super().pieces(size), sources, strict=True):
            yield PairBatch.of(piece.inputs, piece.targets, *of_source), share

    def to(self, device: Any) -> Batch:
        moved = super().to(device)
        return PairBatch.of(moved.inputs, moved.targets, self.source.to(device), self.source_documents.to(device))


class Pairs:
    """The pairs that lie in a stream of tokens: source, tab, target, end. Raises RequestError where one is broken."""

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer):
        between = tokenizer.encode(BETWEEN).tolist()
        if tokenizer.eos_id is None or len(between) != 1:
            raise RequestError(
                f"the {tokenizer.kind} tokenizer has no token of its own for a tab, or none that ends a text; use "
                "byte or char",
                code="conflict", field="tokenizer", value=tokenizer.kind, expected="byte",
            )  # fmt: skip
        self.tokens, self.end = np.asarray(tokens), int(tokenizer.eos_id)
        self.ends, self.tabs = (np.flatnonzero(self.tokens == one) for one in (self.end, between[0]))
        self.starts = np.concatenate([[0], self.ends[:-1] + 1])
        if len(self.tabs) != len(self.ends) or (self.tabs >= self.ends).any() or (self.tabs < self.starts).any():
            raise RequestError(
                f"the text has {len(self.ends):,} documents and {len(self.tabs):,} tabs; a pair is a source, one tab, "
                "and its target",
                code="conflict", field="data", expected="a tab in each document",
            )  # fmt: skip
        if (self.tabs == self.starts).any():
            raise RequestError(
                f"the source of pair {int((self.tabs == self.starts).argmax())} is empty; each pair has a source",
                code="range", field="data", expected="a source before each tab",
            )  # fmt: skip

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def longest(self) -> int:
        """Tokens of the longest source or target, with its end."""
        return int(max((self.tabs - self.starts).max(), (self.ends - self.tabs - 1).max())) + 1

    def batch(self, numbers: Sequence[int] | np.ndarray) -> PairBatch:
        """These pairs, each a row."""

        def padded(rows: list[np.ndarray], with_: int) -> Tensor:
            return pad_sequence([torch.from_numpy(row.astype(np.int64)) for row in rows], True, with_)

        end = np.array([self.end])
        sources = [np.append(self.tokens[self.starts[i] : self.tabs[i]], end) for i in numbers]
        targets = [self.tokens[self.tabs[i] + 1 : self.ends[i] + 1] for i in numbers]
        inputs = [np.concatenate([end, target[:-1]]) for target in targets]
        real = padded([np.ones(len(source)) for source in sources], 0)
        return PairBatch.of(padded(inputs, self.end), padded(targets, IGNORED), padded(sources, self.end), real)


class PairBatches:
    """`batches[step]`: pure functions of (seed, step, rank); an epoch takes each pair once, in an order of its own."""

    def __init__(self, pairs: Pairs, batch: int, seed: int, rank: int = 0, world: int = 1):
        self.pairs, self.batch, self.seed, self.rank, self.world = pairs, batch, seed, rank, world

    def numbers(self, step: int) -> list[int]:
        first, n = (step * self.world + self.rank) * self.batch, len(self.pairs)
        found = []
        for i in range(first, first + self.batch):
            epoch, place = divmod(i, n)
            found.append(int(permute(np.array([place]), n, keyed("pairs", self.seed, epoch))[0]))
        return found

    def __getitem__(self, step: int) -> Batch:
        return self.pairs.batch(self.numbers(step))


class PairWindows(EvaluationWindows):
    """Held-out pairs, evenly spread, the same at every call. Targets have no bytes: a likelihood given a source is
    none of the text."""

    def __init__(self, pairs: Pairs, max_tokens: int | None, batch: int):
        fits = len(pairs)
        scored = int((pairs.ends - pairs.tabs).sum())
        count = fits if max_tokens is None else min(fits, max(1, max_tokens * fits // scored))
        self.pairs, self.batch, self.starts = pairs, batch, np.arange(count) * fits // count

    def __len__(self) -> int:
        return math.ceil(len(self.starts) / self.batch)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        for first in range(0, len(self.starts), self.batch):
            batch = self.pairs.batch(self.starts[first : first + self.batch])
            yield EvaluationBatch(batch, torch.zeros_like(batch.targets))
