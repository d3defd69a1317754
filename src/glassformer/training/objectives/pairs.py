"""Pairs of a source and a target as batches, for models that read a source with an encoder, or before the target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.parts.loss import IGNORED
from glassformer.text import Batch, EvaluationBatch, EvaluationWindows, FedBatch, Tokenizer
from glassformer.text.languages import BETWEEN
from glassformer.text.permutation import keyed, permute

Pair = tuple[np.ndarray, np.ndarray]
"""Tokens of a source and of its target, without ends."""


@dataclass(frozen=True)
class SourceLayout:
    """Where a model reads the source.

    encoder      source + end, read by an encoder; the model's own text is end + target, of which target + end are to be
                 predicted. A batch pads sources behind documents of their own
    no encoder   source + between + target, of which target + end are to be predicted; with `prefix`, source + between
                 see each other
    """

    encoder: bool = True
    prefix: bool = False

    @classmethod
    def of(cls, config: ModelConfig | None) -> SourceLayout:
        if config is None or config.encoder is not None:
            return cls()
        return cls(False, config.takes_prefix)

    def length(self, source: int, target: int) -> int:
        """The context that a pair of so many tokens needs."""
        return max(source, target) + 1 if self.encoder else source + target + 1

    def batch(self, pairs: Sequence[Pair], end: int, between: int) -> Batch:
        """Each pair a row, padded with what is not scored."""

        def padded(rows: list[np.ndarray], filling: int) -> Tensor:
            return pad_sequence([torch.from_numpy(row.astype(np.int64)) for row in rows], True, filling)

        sources, targets = zip(*pairs, strict=True)
        last, parting = np.array([end]), np.array([between])
        asked = [np.concatenate([target, last]) for target in targets]
        if self.encoder:
            given = [np.concatenate([source, last]) for source in sources]
            inputs = [np.concatenate([last, target]) for target in targets]
            return FedBatch.of(
                padded(inputs, end), padded(asked, IGNORED), source=padded(given, end),
                source_documents=padded([np.ones(len(source)) for source in given], 0),
            )  # fmt: skip
        inputs = [np.concatenate([source, parting, target]) for source, target in pairs]
        asked = [
            np.concatenate([np.full(len(one), IGNORED), target]) for one, target in zip(sources, asked, strict=True)
        ]
        if not self.prefix:
            return Batch(padded(inputs, end), padded(asked, IGNORED))
        front = [np.arange(len(row)) <= len(source) for row, source in zip(inputs, sources, strict=True)]
        return FedBatch.of(padded(inputs, end), padded(asked, IGNORED), global_tokens=padded(front, 0).bool())


class Pairs:
    """The pairs that lie in a stream of tokens: source, tab, target, end. Raises RequestError where one is broken."""

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer, layout: SourceLayout | None = None):
        between = tokenizer.encode(BETWEEN).tolist()
        if tokenizer.eos_id is None or len(between) != 1:
            raise RequestError(
                f"the {tokenizer.kind} tokenizer has no token of its own for a tab, or none that ends a text; use "
                "byte or char",
                code="conflict", field="tokenizer", value=tokenizer.kind, expected="byte",
            )  # fmt: skip
        self.tokens, self.end, self.between = np.asarray(tokens), int(tokenizer.eos_id), int(between[0])
        self.layout = layout or SourceLayout()
        self.ends, self.tabs = (np.flatnonzero(self.tokens == one) for one in (self.end, self.between))
        self.starts = np.concatenate([[0], self.ends[:-1] + 1])
        if len(self.tabs) != len(self.ends) or (self.tabs >= self.ends).any() or (self.tabs < self.starts).any():
            raise RequestError(
                f"the text has {len(self.ends):,} documents and {len(self.tabs):,} tabs; a pair is a source, one tab, "
                "and its target",
                code="conflict", field="data", expected="a tab in each document",
            )  # fmt: skip
        for side, empty in (("source", self.tabs == self.starts), ("target", self.ends == self.tabs + 1)):
            if empty.any():
                raise RequestError(
                    f"the {side} of pair {int(empty.argmax())} is empty; each pair has a source and a target",
                    code="range", field="data", expected=f"a {side}",
                )  # fmt: skip

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> Pair:
        start, tab, end = self.starts[number], self.tabs[number], self.ends[number]
        return self.tokens[start:tab], self.tokens[tab + 1 : end]

    @property
    def sizes(self) -> np.ndarray:
        """(n, 2): tokens of each source and target, each with its end."""
        return np.stack([self.tabs - self.starts, self.ends - self.tabs - 1], 1) + 1

    @property
    def context(self) -> int:
        """What the longest pair needs."""
        return max(
            self.layout.length(int(source) - 1, int(target) - 1) for source, target in np.unique(self.sizes, axis=0)
        )

    def batch(self, numbers: Sequence[int] | np.ndarray) -> Batch:
        """These pairs, each a row."""
        return self.layout.batch([self[int(i)] for i in numbers], self.end, self.between)


class PairBatches:
    """`batches[step]`: pure functions of (seed, step, rank); an epoch takes each pair once, in an order of its own.
    `whole`: it has no batch that ends in the next, where a pair might stand twice; what is left is left out."""

    def __init__(self, pairs: Pairs, batch: int, seed: int, rank: int = 0, world: int = 1, whole: bool = False):
        self.pairs, self.batch, self.seed, self.rank, self.world = pairs, batch, seed, rank, world
        self.epoch = len(pairs) - (len(pairs) % (batch * world) if whole else 0)
        self.sizes = pairs.sizes
        self._counted = (0, np.zeros(2, np.int64))
        """Pairs, and the tokens of their sources and targets."""

    @property
    def tokens_per_step(self) -> float:
        return self.batch * self.world * float(self.sizes.sum(1).mean())

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.epoch / (self.batch * self.world))

    def read(self, steps: int) -> dict[str, int]:
        """Tokens of the sources and targets, each with its end."""
        last = steps * self.batch * self.world
        first, counted = self._counted if self._counted[0] <= last else (0, np.zeros(2, np.int64))
        counted = counted + sum((self.sizes[some].sum(0) for some in self._between(first, last)), np.zeros(2, np.int64))
        self._counted = last, counted
        sources, targets = counted.tolist()
        return {"tokens": sources + targets, "sources": sources, "targets": targets}

    def numbers(self, step: int) -> list[int]:
        first = (step * self.world + self.rank) * self.batch
        return [int(one) for some in self._between(first, first + self.batch) for one in some]

    def __getitem__(self, step: int) -> Batch:
        return self.pairs.batch(self.numbers(step))

    def _between(self, first: int, last: int) -> Iterator[np.ndarray]:
        """The numbers of the pairs `first` to `last` of all epochs, piece by piece."""
        while first < last:
            epoch, place = divmod(first, self.epoch)
            taken = min(self.epoch - place, last - first)
            yield permute(np.arange(place, place + taken), len(self.pairs), keyed("pairs", self.seed, epoch))
            first += taken


class PairWindows(EvaluationWindows):
    """Held-out pairs, evenly spread, the same at every call. Targets have no bytes: a likelihood given a source is
    none of the text."""

    def __init__(self, pairs: Pairs, max_tokens: int | None, batch: int):
        fits, scored = len(pairs), int(pairs.sizes[:, 1].sum())
        count = fits if max_tokens is None else min(fits, max(1, max_tokens * fits // scored))
        self.pairs, self.batch, self.starts = pairs, batch, np.arange(count) * fits // count

    def __len__(self) -> int:
        return math.ceil(len(self.starts) / self.batch)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        for first in range(0, len(self.starts), self.batch):
            batch = self.pairs.batch(self.starts[first : first + self.batch])
            yield EvaluationBatch(batch, torch.zeros_like(batch.targets))


def check_pairs(pairs: Pairs, context: int, name: str) -> None:
    """Raises RequestError for a pair that this context does not hold."""
    if (longest := pairs.context) > context:
        what = "a source or target of the {} text has {:,} tokens with its end"
        if not pairs.layout.encoder:
            what = "a source and its target in the {} text have {:,} tokens with what parts them"
        raise RequestError(
            f"{what.format(name, longest)}; the context is {context:,}",
            code="range", field="context", value=context, expected=f"at least {longest}",
        )  # fmt: skip


def refuse_other_texts(kind: str, configs: Mapping[str, ModelConfig]) -> None:
    """Raises RequestError where of models that are compared some have an encoder, and others read what that would in
    front of their own text: the same context then holds less of it."""
    some = {config.encoder is not None: name for name, config in configs.items()}
    if len(some) > 1:
        raise RequestError(
            f"objective={kind} cuts shorter texts for {some[False]}, whose context holds both sides, than for "
            f"{some[True]}, which has an encoder: their losses are of different tokens; compare models of one kind, or "
            "use seq2seq",
            code="conflict", field="objective", value=kind, expected="seq2seq",
        )  # fmt: skip
