"""Batches of pairs of a source and a target, for models that read the source with an encoder, or before the target."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.parts.loss import IGNORED
from glassformer.text import Batch, EvaluationBatch, EvaluationWindows, FedBatch, Tokenizer, Tokens
from glassformer.text.documents import BETWEEN
from glassformer.text.held_out import CUT, FEW
from glassformer.text.permutation import keyed, permute

Pair = tuple[np.ndarray, np.ndarray]
"""Tokens of a source and of its target, without ends."""


@dataclass(frozen=True)
class SourceLayout:
    """Arrangement of a pair, a source and a target, in the inputs of a model.

    encoder      source + end, read by an encoder; the decoder reads end + target and predicts target + end. Sources
                 of a batch are padded with separate documents
    no encoder   source + between + target; predicts target + end. With `prefix`, tokens of source + between attend to
                 each other
    """

    encoder: bool = True
    prefix: bool = False

    @classmethod
    def of(cls, config: ModelConfig | None) -> SourceLayout:
        if config is None or config.encoder is not None:
            return cls()
        return cls(False, config.takes_prefix)

    def length(self, source: int, target: int) -> int:
        """Returns the context length that a pair needs whose source has `source` and whose target has `target`
        tokens."""
        return max(source, target) + 1 if self.encoder else source + target + 1

    def batch(self, pairs: Sequence[Pair], end: int, between: int) -> Batch:
        """Returns a batch with a pair per row, padded with tokens that are not scored."""

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


def refuse_cut(text: Tokens) -> None:
    """Raises RequestError if the held-out part was cut from within documents, because the text has few different ones:
    a record that is cut in two is useless."""
    notes = text.train.info.get("notes")
    if isinstance(notes, dict) and str(notes.get("held_out", "")).startswith(CUT):
        raise RequestError(
            f"the text has fewer than {FEW} different documents, or a few hold nearly all of it, so that whole ones "
            f"cannot be held out; give {FEW} or more that differ",
            code="conflict", field="data", value=notes.get("documents"), expected=f"{FEW} different documents",
        )  # fmt: skip


class RecordStream:
    """Dataset of records in a stream of tokens, one per document: fields with a tab between, and an end token. Raises
    RequestError for a document with too many or too few tabs, or an empty field."""

    fields: ClassVar[tuple[str, ...]] = ("source", "target")
    """Names of the fields."""
    counted: ClassVar[tuple[str, ...]] = ("sources", "targets")
    """Names of the columns of `sizes` that a run counts separately."""

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer):
        between = tokenizer.encode(BETWEEN).tolist()
        if tokenizer.eos_id is None or len(between) != 1:
            raise RequestError(
                f"the {tokenizer.kind} tokenizer has no single token for a tab, or none that ends a text; use "
                "byte or char",
                code="conflict", field="tokenizer", value=tokenizer.kind, expected="byte",
            )  # fmt: skip
        self.tokens, self.end, self.between = np.asarray(tokens), int(tokenizer.eos_id), int(between[0])
        ends, tabs = (np.flatnonzero(self.tokens == one) for one in (self.end, self.between))
        starts, each = np.concatenate([[0], ends[:-1] + 1]), len(self.fields) - 1
        between = tabs.reshape(-1, each) if len(tabs) == each * len(ends) else np.empty((0, each), np.int64)
        if len(between) != len(ends) or (between >= ends[:, None]).any() or (between < starts[:, None]).any():
            raise RequestError(
                f"the text has {len(ends):,} documents and {len(tabs):,} tabs; a document is {', '.join(self.fields)} "
                "with a tab between, and there are 10 or more",
                code="conflict", field="data", expected=f"{each} {'tab' if each == 1 else 'tabs'} in each document",
            )  # fmt: skip
        self.borders = np.column_stack([starts - 1, between, ends])
        """(n, fields + 1): places before the first field, between fields, and of the end."""
        for name, length in zip(self.fields, np.diff(self.borders).T - 1, strict=True):
            if not length.all():
                raise RequestError(
                    f"the {name} of document {int((length == 0).argmax())} is empty; each has {', '.join(self.fields)}",
                    code="range", field="data", expected=f"a {name}",
                )  # fmt: skip

    def __len__(self) -> int:
        return len(self.borders)

    def field(self, number: int, place: int) -> np.ndarray:
        """Returns the tokens of field `place` of record `number`."""
        return self.tokens[self.borders[number, place] + 1 : self.borders[number, place + 1]]

    @property
    def sizes(self) -> np.ndarray:
        """Number of tokens in each field of each record, (n, k), with the token that ends the field."""
        return np.diff(self.borders)

    @abstractmethod
    def batch(self, numbers: Sequence[int] | np.ndarray) -> Batch:
        """Returns a batch with the records `numbers` as its rows."""


class Pairs(RecordStream):
    """Dataset of pairs in a stream of tokens: source, tab, target, end."""

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer, layout: SourceLayout | None = None):
        super().__init__(tokens, tokenizer)
        self.layout = layout or SourceLayout()

    def __getitem__(self, number: int) -> Pair:
        return self.field(number, 0), self.field(number, 1)

    @property
    def context(self) -> int:
        """Context length, in tokens, that the longest pair needs."""
        return max(
            self.layout.length(int(source) - 1, int(target) - 1) for source, target in np.unique(self.sizes, axis=0)
        )

    def batch(self, numbers: Sequence[int] | np.ndarray) -> Batch:
        return self.layout.batch([self[int(i)] for i in numbers], self.end, self.between)


class PairBatches:
    """Training batches of records: `batches[step]` is a pure function of (seed, step, rank); an epoch takes each record
    once, in a separate random order. `whole`: True if no batch crosses into the next epoch, where a pair could occur
    twice; an epoch then leaves out the records that fill no batch."""

    def __init__(self, pairs: RecordStream, batch: int, seed: int, rank: int = 0, world: int = 1, whole: bool = False):
        self.pairs, self.batch, self.seed, self.rank, self.world = pairs, batch, seed, rank, world
        self.epoch = len(pairs) - (len(pairs) % (batch * world) if whole else 0)
        self.sizes = pairs.sizes
        self._counted = (0, np.zeros(self.sizes.shape[1], np.int64))
        """Number of records read, and the counted tokens in them."""

    @property
    def tokens_per_step(self) -> float:
        return self.batch * self.world * float(self.sizes.sum(1).mean())

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.epoch / (self.batch * self.world))

    def read(self, steps: int) -> dict[str, int]:
        """Returns the numbers of source and target tokens read in the first `steps`, end tokens included."""
        last = steps * self.batch * self.world
        first, counted = self._counted if self._counted[0] <= last else (0, np.zeros(self.sizes.shape[1], np.int64))
        for some in self._between(first, last):
            counted = counted + self.sizes[some].sum(0)
        self._counted = last, counted
        return {"tokens": int(counted.sum()), **dict(zip(self.pairs.counted, counted.tolist(), strict=False))}

    def numbers(self, step: int) -> list[int]:
        first = (step * self.world + self.rank) * self.batch
        return [int(one) for some in self._between(first, first + self.batch) for one in some]

    def __getitem__(self, step: int) -> Batch:
        return self.pairs.batch(self.numbers(step))

    def _between(self, first: int, last: int) -> Iterator[np.ndarray]:
        """Yields the indices of records `first` to `last`, counted through all epochs, epoch by epoch."""
        while first < last:
            epoch, place = divmod(first, self.epoch)
            taken = min(self.epoch - place, last - first)
            yield permute(np.arange(place, place + taken), len(self.pairs), keyed("pairs", self.seed, epoch))
            first += taken


class PairWindows(EvaluationWindows):
    """Held-out records for evaluation, evenly spread, equal at every call. Targets have no bytes: a likelihood given a
    source is not one of the text."""

    def __init__(self, pairs: RecordStream, max_tokens: int | None, batch: int):
        fits, scored = len(pairs), int(pairs.sizes[:, -1].sum())
        count = fits if max_tokens is None else min(fits, max(1, max_tokens * fits // scored))
        self.pairs, self.batch, self.starts = pairs, batch, np.arange(count) * fits // count

    def __len__(self) -> int:
        return math.ceil(len(self.starts) / self.batch)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        for first in range(0, len(self.starts), self.batch):
            batch = self.pairs.batch(self.starts[first : first + self.batch])
            yield EvaluationBatch(batch, torch.zeros_like(batch.targets))


def check_pairs(pairs: Pairs, context: int, name: str) -> None:
    """Raises RequestError if a pair is longer than the context."""
    if (longest := pairs.context) > context:
        what = "a source or target of the {} text has {:,} tokens with its end"
        if not pairs.layout.encoder:
            what = "a source and its target in the {} text have {:,} tokens with what parts them"
        raise RequestError(
            f"{what.format(name, longest)}; the context is {context:,}",
            code="range", field="context", value=context, expected=f"at least {longest}",
        )  # fmt: skip


def refuse_other_texts(kind: str, configs: Mapping[str, ModelConfig]) -> None:
    """Raises RequestError for a comparison in which some models have an encoder and others read the source before their
    text, because a context then holds less text."""
    some = {config.encoder is not None: name for name, config in configs.items()}
    if len(some) > 1:
        raise RequestError(
            f"objective={kind} cuts shorter texts for {some[False]}, whose context holds both sides, than for "
            f"{some[True]}, which has an encoder: their losses are of different tokens; compare models of one kind, or "
            "use seq2seq",
            code="conflict", field="objective", value=kind, expected="seq2seq",
        )  # fmt: skip
