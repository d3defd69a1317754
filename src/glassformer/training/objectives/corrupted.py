"""Batches and held-out windows of a text whose rows are corrupted at random, with a separate seed for each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from glassformer.parts.loss import IGNORED
from glassformer.text import Batch, Batches, EvaluationBatch, EvaluationWindows, Tokens
from glassformer.text.permutation import keyed

Change = Callable[[Batch, Sequence[int]], Batch]
"""Function from a batch of texts (b, s) and a random seed ("key") for each row to the corrupted batch with its
targets."""


class CorruptedBatches(Batches):
    """Training batches: the inputs of `Batches`, corrupted by `change`. The seed of a row depends only on `seed` and
    the number of the sequence, not on the number of processes."""

    def __init__(self, change: Change, name: str, tokens: np.ndarray, batch: int, context: int, seed: int,
                 rank: int = 0, world: int = 1):  # fmt: skip
        super().__init__(tokens, batch, context, seed, rank, world)
        self.change, self.name = change, name

    def __getitem__(self, step: int) -> Batch:
        first = (step * self.world + self.rank) * self.batch
        keys = [keyed(self.name, self.seed, first + row) for row in range(self.batch)]
        return self.change(super().__getitem__(step), keys)


class CorruptedWindows(EvaluationWindows):
    """Held-out windows: the inputs of `EvaluationWindows`, corrupted by `change` equally for every model and seed.
    `likelihood`: True if targets have the bytes of the text, for bits per byte; otherwise 0 bytes."""

    def __init__(self, change: Change, name: str, text: Tokens, context: int, max_tokens: int | None, batch: int,
                 likelihood: bool = False):  # fmt: skip
        super().__init__(text.validation, context, max_tokens, None, text.token_bytes, batch)
        self.change, self.name, self.likelihood = change, name, likelihood

    def __iter__(self) -> Iterator[EvaluationBatch]:
        for first, plain in zip(range(0, len(self.starts), self.batch), super().__iter__(), strict=True):
            keys = [keyed(f"{self.name} evaluation", int(start)) for start in self.starts[first : first + self.batch]]
            batch = self.change(plain.batch, keys)
            scored = plain.bytes * (batch.targets != IGNORED) if self.likelihood else torch.zeros_like(batch.targets)
            yield EvaluationBatch(batch, scored)
