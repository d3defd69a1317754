"""Decode state: memory of the tokens that a model has read, so that later calls need not read them again.

Every mixer allocates its own typed state; the model holds one per layer, outside the module tree, and passes it in.
States are preallocated and updated in place; memory on a CPU is allocated as tokens are read. One counter,
`ModelState.length`, is advanced by the model. Only methods of a state write its fields.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from glassformer.errors import RequestError


class State(ABC):
    """Base of decode states: the memory of one mixer for b sequences."""

    kind = "other"
    """Kind of this memory, for sums of bytes by kind: cache, window, latent, recurrent, source or other."""
    rewind: int | None = None
    """Number of tokens that `truncate` can take back from the furthest token ever read; None without a bound."""

    @property
    def memory_len(self) -> int:
        """Number of tokens of another sequence (cross-attention) that the state has room for."""
        return 0

    @property
    def furthest(self) -> int:
        """Largest number of tokens read since the state was empty, if it bounds how far `truncate` can go back;
        otherwise 0."""
        return 0

    def mark(self, length: int) -> None:
        """Records that `length` tokens have been read, if other code than this state's methods stored them."""
        return

    @property
    def ring(self) -> tuple[Any, Any] | None:
        """Tuple (keys, values) of a cache whose token i is in slot i mod the number of slots; None for a state of
        another kind."""
        return None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Number of bytes that the tensors of this state take."""

    def by_kind(self) -> dict[str, int]:
        """Returns {kind of memory: bytes} of this state."""
        return {self.kind: self.nbytes}

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of this state by name, with rows along the first axis: the memory itself, not a copy."""

    @abstractmethod
    def over(self, tensors: Mapping[str, Tensor]) -> State:
        """Returns a state like this one whose memory is the given tensors, named and shaped as in `self.tensors()`, but
        perhaps with more slots."""

    def upto(self, length: int) -> dict[str, Tensor]:
        """Returns the tensors of this state by name, cut to the slots that `length` tokens have filled."""
        return self.tensors()

    def reorder(self, index: Tensor, length: int) -> None:
        """Replaces each row i by the previous content of row index[i] (beam search), for index (b,); `length`: number
        of tokens that rows have read."""
        for tensor in self.upto(length).values():
            tensor.copy_(torch.index_select(tensor, 0, index))

    def put(self, row: int, other: State, length: int) -> None:
        """Copies the only row of `other`, which has read `length` tokens, to row `row`."""
        given = other.upto(length)
        for name, mine in self.upto(length).items():
            mine[row] = given[name][0]

    def clear(self, row: int, length: int) -> None:
        """Zeroes row `row`, which has read `length` tokens."""
        for tensor in self.upto(length).values():
            tensor[row].zero_()

    def reserve(self, memory_len: int) -> None:
        """Makes room for a memory of `memory_len` tokens of another sequence; does nothing in states that keep no such
        memory."""
        return

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Removes every token after the first `length` from the state (rejected speculation)."""


def added_up(kinds: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns {kind of memory: bytes} summed over several states."""
    found = Counter[str]()
    for one in kinds:
        found.update(one)
    return dict(found)


class BoundedState(State):
    """Base of decode states of bounded length: `truncate` goes back at most `rewind` tokens from the furthest token
    read."""

    rewind: int = 0
    read = 0
    """Number of tokens read since the state was empty; going back does not lower it."""

    @property
    def furthest(self) -> int:
        return self.read

    def mark(self, length: int) -> None:
        self.read = max(self.read, length)

    def put(self, row: int, other: State, length: int) -> None:
        super().put(row, other, length)
        self.mark(other.furthest)

    def go_back(self, length: int, why: str) -> None:
        """Raises RequestError, with a message that starts with `why`, if `truncate` cannot go back to `length` tokens;
        for length 0 sets `read` to 0."""
        if length == 0:
            self.read = 0
        elif length < self.read - self.rewind:
            raise RequestError(
                f"{why} and has forgotten what came before token {self.read - self.rewind}; it cannot go back to "
                f"{length}",
                code="unsupported", field="length", value=length,
            )  # fmt: skip


class ModelState:
    """Decode state of a model: the states of all layers, the number of tokens read, and the document of each token.

    layers     one State per layer, in order
    length     tokens read so far, by the longest row
    rows       (b,) tokens read by each row, once rows have separate lengths (`spread`)
    seen       number of slots that queries attend to, empty ones included, chosen so that compiled code meets few
               shapes; None for all tokens that the longest row has read
    rewind     number of tokens that a window or a recurrence can be taken back
    documents  (b, max_len) ids, present once a call has named documents
    positions  (b, max_len) true positions, present once a call has given some
    """

    def __init__(self, layers: Sequence[State | None], batch: int, max_len: int, rewind: int = 0):
        self.layers = list(layers)
        self.batch = batch
        self.max_len = max_len
        self.rewind = rewind
        self.length = 0
        self.rows: Tensor | None = None
        self.seen: int | None = None
        self.documents: Tensor | None = None
        self.positions: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes that the states of all layers take."""
        return sum(layer.nbytes for layer in self.layers if layer is not None)

    def by_kind(self) -> dict[str, int]:
        """Returns {kind of memory: bytes} over all layers."""
        return added_up(layer.by_kind() for layer in self.layers if layer is not None)

    @property
    def memory_len(self) -> int:
        """Number of tokens of another sequence for which the layers have room."""
        return max((layer.memory_len for layer in self.layers if layer is not None), default=0)

    @property
    def furthest(self) -> int:
        """Number of tokens ever read, if that bounds how far a layer can go back (`truncate`); otherwise 0."""
        return max((layer.furthest for layer in self.layers if layer is not None), default=0)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of all layers, named `layer.name`: the memory itself, not a copy."""
        held = [(i, layer) for i, layer in enumerate(self.layers) if layer is not None]
        return {f"{i}.{name}": tensor for i, layer in held for name, tensor in layer.tensors().items()}

    def over(self, tensors: Mapping[str, Tensor], rows: Tensor | None = None, seen: int | None = None) -> ModelState:
        """Returns a state like this one whose memory is the given tensors, named as in `self.tensors()`, with these
        values of its fields `rows` and `seen`."""
        other = copy.copy(self)
        parts: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            i, _, part = name.partition(".")
            parts.setdefault(int(i), {})[part] = tensor
        other.layers = [layer and layer.over(parts[i]) for i, layer in enumerate(self.layers)]
        other.rows, other.seen = rows, seen
        return other

    def first(self, count: int) -> ModelState:
        """Returns a state of only the first `count` rows, which shares this one's memory."""
        other = self.over({name: tensor[:count] for name, tensor in self.tensors().items()})
        other.batch = count
        return other

    def repeated(self, room: ModelState) -> ModelState:
        """Returns a state whose rows are all copies of this state's only row, in the memory of `room`, an empty state
        of this model."""
        for mine, theirs in zip(self.layers, room.layers, strict=True):
            given = mine.upto(self.length) if mine is not None else {}
            for name, tensor in theirs.upto(self.length).items() if theirs is not None else ():
                tensor.copy_(given[name])
        other = self.over(room.tensors())
        other.batch = room.batch
        return other

    def row(self, i: int) -> ModelState:
        """Returns a state of only row i, which shares this one's memory; a `put` into that row afterwards sets its
        length. Raises ValueError if rows were padded."""
        if self.documents is not None or self.positions is not None:
            raise ValueError("rows that were padded on the left cannot continue separately")
        other = self.over({name: tensor[i : i + 1] for name, tensor in self.tensors().items()})
        other.batch, other.length = 1, self.length if self.rows is None else int(self.rows[i])
        return other

    def advance(self, end: int, tokens: int) -> None:
        """Adds `tokens` to the number of tokens that each row has read; `end` is the new number of the longest row.
        `tokens` is 0 if the numbers of the rows are up to date."""
        self.length = end
        if self.rows is not None and tokens:
            self.rows += tokens

    def lengths(self) -> Tensor:
        """Returns the number of tokens that each row has read, (b,) int64."""
        return torch.full((self.batch,), self.length) if self.rows is None else self.rows.contiguous()

    def seek(self, length: int, furthest: int = 0) -> None:
        """Sets the length of all rows to `length` tokens, which other code has written into the layers: from another
        state, from a file, or in a compiled step. `furthest`: the number of tokens that had been read before, if
        larger."""
        self.length, self.rows = length, None
        for layer in self.layers:
            if layer is not None:
                layer.mark(max(length, furthest))

    def spread(self, lengths: Sequence[int]) -> None:
        """Gives rows separate lengths. A row that becomes shorter loses its later tokens, such as right-padding, as far
        as the layers can go back (`truncate`)."""
        if self.documents is not None or self.positions is not None:
            raise ValueError("rows that were padded on the left already share one length")
        if self.rows is None:
            for shorter in {length for length in lengths if 0 < length < self.length}:
                for layer in self.layers:
                    if layer is not None:
                        layer.truncate(shorter)
        if self.rows is None:
            tensors = self.tensors()
            device = next(iter(tensors.values())).device if tensors else None
        else:
            device = self.rows.device
        self.rows = torch.tensor(list(lengths), device=device)
        self.length = max(lengths)

    def put(self, row: int, other: ModelState) -> None:
        """Copies the only row of `other` to row `row`, for a request that joins a running batch. Call `spread`
        afterwards to set the lengths."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if mine is not None and theirs is not None:
                mine.put(row, theirs, other.length)

    def move(self, row: int, to: int, length: int) -> None:
        """Copies row `row`, which has read `length` tokens, to the empty row `to`."""
        moved = self.row(row)
        moved.length = length
        self.put(to, moved)

    def clear(self, row: int, length: int) -> None:
        """Zeroes the memory of row `row`, which has read `length` tokens, because a NaN in it would reach the row's
        next user: masked slots are multiplied by 0, and 0 * NaN is NaN."""
        for layer in self.layers:
            if layer is not None:
                layer.clear(row, length)

    def reorder(self, index: Tensor) -> None:
        """Replaces each row i by the previous content of row index[i], for index (b,) of integers (beam search)."""
        if index.shape != (self.batch,) or index.dtype not in (torch.int64, torch.int32):  # else it is spread silently
            raise RequestError(
                f"index is {index.dtype} of shape {tuple(index.shape)}; a state of {self.batch} rows is reordered by "
                f"({self.batch},) row numbers in torch.int64",
                code="conflict", field="index", value=tuple(index.shape),
            )  # fmt: skip
        for layer in self.layers:
            if layer is not None:
                layer.reorder(index, self.length)
        if self.documents is not None:
            self.documents = self.documents[index]
        if self.positions is not None:
            self.positions = self.positions[index]
        if self.rows is not None:
            self.rows = self.rows[index]

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise RequestError(
                f"truncate({length}) of a state that holds {self.length} tokens",
                code="range", field="length", value=length,
            )  # fmt: skip
        for layer in self.layers:
            if layer is not None:
                layer.truncate(length)
        self.length = length
        if self.rows is not None:
            self.rows.clamp_(max=length)
        if length == 0:
            self.documents = self.positions = None

    def record_documents(self, documents: Tensor) -> Tensor:
        """Stores `documents`, the ids (b, s) of the tokens about to be read; returns the ids of all tokens so far (b,
        t)."""
        end = self.length + documents.shape[1]
        if self.documents is None:
            self.documents = documents.new_zeros(documents.shape[0], self.max_len)
        self.documents[:, self.length : end] = documents
        return self.documents[:, :end]

    def record_positions(self, positions: Tensor, before: Tensor) -> Tensor:
        """Stores the true positions (b, s) of the tokens about to be read, and those of the tokens `before` if they
        were not stored; returns those of all tokens so far (b, t)."""
        end = self.length + positions.shape[-1]
        if self.positions is None:
            self.positions = positions.new_zeros(self.batch, self.max_len)
            self.positions[:, : self.length] = before
        self.positions[:, self.length : end] = positions
        return self.positions[:, :end]
