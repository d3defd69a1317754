"""Training and evaluation batches as pure functions of a stream of tokens: they have no state to save."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from glassformer.errors import RequestError
from glassformer.text.permutation import keyed, permuted
from glassformer.text.shards import TokenShards

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


class Batch(NamedTuple):
    """A batch of sequences. `targets[:, i]` is predicted at `inputs[:, i]`: the next token unless an objective differs;
    a target of -100 is not scored. All fields have a row for each sequence."""

    inputs: Int[Tensor, "b s"]
    targets: Int[Tensor, "b s"]

    @property
    def beside(self) -> dict[str, Any]:
        """Further inputs of the model by their names in `Model.loss`, with a row for each sequence; {} for tokens
        only."""
        return {}

    def pieces(self, size: int) -> Iterator[tuple[Batch, float]]:
        """Yields (batch of at most `size` rows, its share of the scored targets) until all rows are covered."""
        from glassformer.parts.loss import IGNORED  # imports torch, which preparing a text does not need

        whole = max(1, int((self.targets != IGNORED).sum()))
        for first in range(0, len(self.inputs), size):
            piece = self._each(operator.itemgetter(slice(first, first + size)))
            yield piece, int((piece.targets != IGNORED).sum()) / whole

    def to(self, device: Any) -> Batch:
        return self._each(lambda field: field.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(*map(change, self))


class FedBatch(Batch):
    """A batch with further inputs of the model (`given`, by name) in addition to tokens, such as a source."""

    given: dict[str, Tensor]

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor, **given: Tensor) -> FedBatch:
        made = cls(inputs, targets)
        made.given = given
        return made

    @property
    def beside(self) -> dict[str, Any]:
        return self.given

    def _each(self, change: Callable[[Tensor], Tensor]) -> FedBatch:
        return FedBatch.of(*map(change, self), **{name: change(field) for name, field in self.given.items()})


class EvaluationBatch(NamedTuple):
    """A batch, and the number of bytes of text of each scored target, 0 elsewhere."""

    batch: Batch
    bytes: Int[Tensor, "b s"]


class Batches:
    """`batches[step]` -> (inputs, targets), (batch, context) int64: a pure function of (seed, step, rank).

    An epoch cuts the n tokens, from an epoch-specific offset on, into W windows of `context` inputs that do not
    overlap, and takes each exactly once, in an epoch-specific order:

        sequence i of all  =  step * batch * world + rank * batch + row
        epoch, place       =  divmod(i, W)
        first token        =  offset(seed, epoch) + context * permutation(seed, epoch)(place)

    So ranks divide the sequences that one rank would read, batches cross the border of epochs, and only less than two
    windows of text at the ends are dropped, which another epoch's offset includes. The order of sequences depends only
    on (seed, context, n): models that share those read the same data in the same order.

    `tokens` is a TokenShards or any one-dimensional array of integers.
    """

    def __init__(
        self,
        tokens: TokenShards | np.ndarray,
        batch: int,
        context: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        for name, value in (("batch", batch), ("context", context), ("world", world)):
            if value < 1:
                raise RequestError(f"{name}={value} must be at least 1", code="range", field=name, value=value)
        if not 0 <= rank < world:
            raise RequestError(
                f"rank={rank} must lie between 0 and world - 1 = {world - 1}", code="range", field="rank", value=rank
            )
        self.tokens = _array(tokens)
        self.batch, self.context, self.seed, self.rank, self.world = batch, context, int(seed), rank, world
        n = len(self.tokens)
        refuse_long(context, n, "training text")
        # One window less than would fit, so that offsets can move every border of a window to any place.
        self.windows = max(1, (n - context) // context)
        # Number of offsets; with the last of them, the last token is a target.
        self._offsets = n - self.windows * context

    @property
    def tokens_per_step(self) -> int:
        """Number of targets of one step over all ranks."""
        return self.batch * self.context * self.world

    def read(self, steps: int) -> dict[str, int]:
        """Returns {"tokens": number of targets in the first `steps` steps, over all ranks}."""
        return {"tokens": steps * self.tokens_per_step}

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps until every window has been read at least once."""
        return math.ceil(self.windows / (self.batch * self.world))

    def epoch(self, step: int) -> int:
        """Returns the epoch in which `step` starts."""
        return step * self.batch * self.world // self.windows

    def starts(self, step: int) -> np.ndarray:
        """Returns the index of the first input token of each row of a step, (batch,) int64."""
        if step < 0:
            raise IndexError(f"step {step} must not be negative")
        first = (step * self.world + self.rank) * self.batch
        starts = np.empty(self.batch, np.int64)
        row = 0
        while row < self.batch:  # once, or once for each epoch that the batch spans
            epoch, place = divmod(first + row, self.windows)
            rows = min(self.batch - row, self.windows - place)
            offset, key = _order(self.seed, epoch, self._offsets)
            window = permuted(place, rows, self.windows, key)
            starts[row : row + rows] = offset + self.context * window
            row += rows
        return starts

    def __getitem__(self, step: int) -> Batch:
        windows = _gather(self.tokens, self.starts(step), self.context + 1)
        return Batch(_tensor(windows[:, :-1]), _tensor(windows[:, 1:]))


@lru_cache(maxsize=64)
def _order(seed: int, epoch: int, offsets: int) -> tuple[int, int]:
    """Returns (offset of an epoch's first window, below `offsets`; key of its permutation of windows)."""
    return keyed("offset", seed, epoch) % offsets, keyed("order", seed, epoch)


class EvaluationWindows:
    """Evaluation batches of windows evenly spaced over the text, equal at every iteration.

    With stride = context (the default) windows do not overlap and every target of a window is scored. With a smaller
    stride a window starts `stride` after the previous one and scores only its last `stride` targets, so each has at
    least `context - stride` tokens before it; no target is scored twice. If all windows would score more than
    `max_tokens`, the largest number that fits is taken, evenly spaced.

        loss in nats  =  sum(nll) / scored targets          bits per byte  =  sum(nll) / (ln 2 * sum(bytes))
    """

    def __init__(
        self,
        tokens: TokenShards | np.ndarray,
        context: int,
        max_tokens: int | None,
        stride: int | None,
        token_bytes: np.ndarray,
        batch: int,
    ) -> None:
        stride = context if stride is None else stride
        for name, value in (("context", context), ("batch", batch), ("max_tokens", max_tokens)):
            if value is not None and value < 1:
                raise RequestError(f"{name}={value} must be at least 1", code="range", field=name, value=value)
        if not 1 <= stride <= context:
            raise RequestError(
                f"stride={stride} must lie between 1 and context={context}", code="range", field="stride", value=stride
            )
        self.tokens = _array(tokens)
        self.context, self.stride, self.batch = context, stride, batch
        self.token_bytes = np.asarray(token_bytes, np.int64)
        n = len(self.tokens)
        refuse_long(context, n, "held-out text")
        fits = (n - 1 - context) // stride + 1
        count = fits if max_tokens is None else min(fits, max(1, max_tokens // stride))
        self.starts: np.ndarray = np.arange(count) * fits // count * stride

    def __len__(self) -> int:
        """Returns the number of batches."""
        return math.ceil(len(self.starts) / self.batch)

    @property
    def scored(self) -> int:
        """Number of scored targets. The first window scores all of its targets; the first `context - stride` are in no
        other."""
        return len(self.starts) * self.stride + (self.context - self.stride)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        from glassformer.parts.loss import IGNORED  # imports torch, which preparing a text does not need

        for first in range(0, len(self.starts), self.batch):
            starts = self.starts[first : first + self.batch]
            windows = _gather(self.tokens, starts, self.context + 1)
            targets = windows[:, 1:].copy()
            weight = self.token_bytes[targets]
            unscored = (np.arange(self.context) < self.context - self.stride) & (starts > 0)[:, None]
            targets[unscored], weight[unscored] = IGNORED, 0
            yield EvaluationBatch(Batch(_tensor(windows[:, :-1]), _tensor(targets)), _tensor(weight))


def evaluation_windows(
    tokens: TokenShards | np.ndarray,
    context: int,
    max_tokens: int | None = None,
    stride: int | None = None,
    *,
    token_bytes: np.ndarray,
    batch: int = 8,
) -> EvaluationWindows:
    """Returns the windows on which a model is evaluated (see `EvaluationWindows`); `token_bytes` (v,) has the bytes of
    each token. Raises RequestError if `context` is longer than the text."""
    return EvaluationWindows(tokens, context, max_tokens, stride, token_bytes, batch)


def bits_per_byte(nats: float, text_bytes: int) -> float:
    """Returns bits per byte, which is comparable across tokenizers, from the total negative log likelihood in nats and
    the number of predicted bytes."""
    if text_bytes < 1:
        raise RequestError(
            "bits per byte need at least one byte of text", code="range", field="text_bytes", value=text_bytes
        )
    return nats / (math.log(2) * text_bytes)


def _array(tokens: TokenShards | np.ndarray) -> np.ndarray:
    array = np.asanyarray(tokens.tokens if isinstance(tokens, TokenShards) else tokens)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RequestError(
            f"tokens must be one row of integers, not {array.ndim}-dimensional {array.dtype}",
            code="type", field="tokens",
        )  # fmt: skip
    return array


def refuse_long(context: int, n: int, what: str) -> None:
    """Raises RequestError if `what`, a text of n tokens, is shorter than `context` inputs and the target of the last
    one."""
    if n < context + 1:
        raise RequestError(
            f"context={context} needs at least {context + 1} tokens, and the {what} has {n}; "
            f"use a context of at most {max(n - 1, 0)}, or give more text",
            code="range", field="context", value=context,
        )  # fmt: skip


def _gather(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Returns the windows of `length` tokens from each start, (rows, length) int64. Copies row by row, because a memory
    map then reads only the pages of these windows."""
    found = np.empty((len(starts), length), np.int64)
    for row, start in enumerate(starts.tolist()):
        found[row] = tokens[start : start + length]
    return found


def _tensor(array: np.ndarray) -> Tensor:
    import torch  # late, because preparing a text does not need it

    return torch.from_numpy(array.copy())  # inputs and targets of one row would share their memory
