"""Decode state: what a model keeps of the tokens it has read, so that the next ones need not read them again.

Every mixer allocates its own typed state; the model holds one per layer, outside the module tree, and passes it in.
States are preallocated and updated in place; memory on a CPU is taken as tokens are read. One counter,
`ModelState.length`, is advanced by the model. Only methods of a state write its fields.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from glassformer.errors import RequestError


class State(ABC):
    """One mixer's memory of b sequences."""

    kind = "other"
    """What it is, for those who add up bytes: a cache, a window, a latent, a recurrent state, a source's keys."""
    rewind: int | None = None
    """How many tokens `truncate` can take back from the furthest ever read; None: any number."""

    @property
    def memory_len(self) -> int:
        """Tokens of another sequence that it has room for."""
        return 0

    @property
    def furthest(self) -> int:
        """Number of tokens ever read since the state was empty, where going back is bounded by it; 0 elsewhere."""
        return 0

    def mark(self, length: int) -> None:
        """Notes that `length` tokens have been read, where something else than this state's methods wrote them."""
        return

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated."""

    def by_kind(self) -> dict[str, int]:
        """`nbytes` by kind."""
        return {self.kind: self.nbytes}

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What it consists of, row by row along the first axis: the memory itself, not a copy."""

    @abstractmethod
    def over(self, tensors: Mapping[str, Tensor]) -> State:
        """The same kind of state with these as its memory, named and shaped as in `tensors` (slots may be more)."""

    def upto(self, length: int) -> dict[str, Tensor]:
        """The part of `tensors` that `length` tokens have filled."""
        return self.tensors()

    def reorder(self, index: Tensor, length: int) -> None:
        """Row i becomes what row index[i] was (beam search); rows have read `length` tokens; index (b,)."""
        for tensor in self.upto(length).values():
            tensor.copy_(torch.index_select(tensor, 0, index))

    def put(self, row: int, other: State, length: int) -> None:
        """Row `row` becomes the only row of `other`, which has read `length` tokens."""
        given = other.upto(length)
        for name, mine in self.upto(length).items():
            mine[row] = given[name][0]

    def clear(self, row: int, length: int) -> None:
        """Row `row`, which has read `length` tokens, holds zeros again."""
        for tensor in self.upto(length).values():
            tensor[row].zero_()

    def reserve(self, memory_len: int) -> None:
        """Makes room for a memory of `memory_len` tokens, in states that keep what they read of another sequence."""
        return

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forgets every token after the first `length` (rejected speculation)."""


def added_up(kinds: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Bytes of several states by kind."""
    found = Counter[str]()
    for one in kinds:
        found.update(one)
    return dict(found)


class BoundedState(State):
    """A decode state of bounded length: `truncate` goes back at most `rewind` tokens from the furthest token read."""

    rewind: int = 0
    read = 0
    """Tokens before this one have been read, since the state was empty; going back does not lower it."""

    @property
    def furthest(self) -> int:
        return self.read

    def mark(self, length: int) -> None:
        self.read = max(self.read, length)

    def put(self, row: int, other: State, length: int) -> None:
        super().put(row, other, length)
        self.mark(other.furthest)

    def go_back(self, length: int, why: str) -> None:
        """Whether `truncate` may: RequestError that says why not, and 0 tokens are read once none are left."""
        if length == 0:
            self.read = 0
        elif length < self.read - self.rewind:
            raise RequestError(
                f"{why} and has forgotten what came before token {self.read - self.rewind}; it cannot go back to "
                f"{length}",
                code="unsupported", field="length", value=length,
            )  # fmt: skip


class ModelState:
    """The states of all layers, the number of tokens read, and which document each token belongs to.

    layers     one State per layer, in order
    length     tokens read so far; of the longest row, where they differ
    rows       (b,) tokens read by each row, once rows go on at lengths of their own (`spread`)
    seen       with `rows`: queries look at so many slots, filled or not, so that compiled code meets few shapes
    rewind     how many tokens a window or a recurrence can be taken back
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
        """Bytes allocated by all layers."""
        return sum(layer.nbytes for layer in self.layers if layer is not None)

    def by_kind(self) -> dict[str, int]:
        """`nbytes` by kind of state."""
        return added_up(layer.by_kind() for layer in self.layers if layer is not None)

    @property
    def memory_len(self) -> int:
        """Tokens of another sequence that the layers which read one have room for."""
        return max((layer.memory_len for layer in self.layers if layer is not None), default=0)

    @property
    def furthest(self) -> int:
        """Number of tokens ever read, where a layer's going back is bounded by it (`truncate`); 0 elsewhere."""
        return max((layer.furthest for layer in self.layers if layer is not None), default=0)

    def tensors(self) -> dict[str, Tensor]:
        """The memory of all layers, by `layer.name`."""
        held = [(i, layer) for i, layer in enumerate(self.layers) if layer is not None]
        return {f"{i}.{name}": tensor for i, layer in held for name, tensor in layer.tensors().items()}

    def over(self, tensors: Mapping[str, Tensor], rows: Tensor | None = None, seen: int | None = None) -> ModelState:
        """A state like this one that lives in `tensors`, named as in `tensors()`, with these `rows` and `seen`."""
        other = copy.copy(self)
        parts: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            i, _, part = name.partition(".")
            parts.setdefault(int(i), {})[part] = tensor
        other.layers = [layer and layer.over(parts[i]) for i, layer in enumerate(self.layers)]
        other.rows, other.seen = rows, seen
        return other

    def first(self, count: int) -> ModelState:
        """The first `count` rows, in the same memory."""
        other = self.over({name: tensor[:count] for name, tensor in self.tensors().items()})
        other.batch = count
        return other

    def repeated(self, room: ModelState) -> ModelState:
        """Returns a state of copies of this only row, in the memory of `room`, an empty state of this model."""
        for mine, theirs in zip(self.layers, room.layers, strict=True):
            given = mine.upto(self.length) if mine is not None else {}
            for name, tensor in theirs.upto(self.length).items() if theirs is not None else ():
                tensor.copy_(given[name])
        other = self.over(room.tensors())
        other.batch = room.batch
        return other

    def row(self, i: int) -> ModelState:
        """Row i alone, in the same memory; `put` then says what it has read. ValueError where rows were padded."""
        if self.documents is not None or self.positions is not None:
            raise ValueError("rows that were padded on the left do not go on alone")
        other = self.over({name: tensor[i : i + 1] for name, tensor in self.tensors().items()})
        other.batch, other.length = 1, self.length if self.rows is None else int(self.rows[i])
        return other

    def advance(self, end: int, tokens: int) -> None:
        """Every row has read `tokens` more; the longest now ends at `end`. With 0 `tokens`, rows have been counted."""
        self.length = end
        if self.rows is not None and tokens:
            self.rows += tokens

    def seek(self, length: int, furthest: int = 0) -> None:
        """Places all rows after `length` tokens, which the layers hold already: another state, a file or compiled code
        wrote them. `furthest`: the number of tokens that had been read there, where it is larger."""
        self.length, self.rows = length, None
        for layer in self.layers:
            if layer is not None:
                layer.mark(max(length, furthest))

    def spread(self, lengths: Sequence[int]) -> None:
        """From now on rows have lengths of their own, and these. A row whose length goes down forgets what came after;
        what right-padding a row has read is forgotten so, where the layers can still go back (`truncate`)."""
        if self.documents is not None or self.positions is not None:
            raise ValueError("rows that were padded on the left already share one length")
        if self.rows is None:
            for shorter in {length for length in lengths if 0 < length < self.length}:
                for layer in self.layers:
                    if layer is not None:
                        layer.truncate(shorter)
        tensors = self.tensors()
        device = next(iter(tensors.values())).device if tensors else None
        self.rows = torch.tensor(list(lengths), device=device)
        self.length = max(lengths)

    def put(self, row: int, other: ModelState) -> None:
        """Row `row` becomes the only row of `other`: a request joins a running batch. `spread` then says how long
        all rows are."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if mine is not None and theirs is not None:
                mine.put(row, theirs, other.length)

    def move(self, row: int, to: int, length: int) -> None:
        """Copies row `row`, which has read `length` tokens, to row `to`, which is empty."""
        moved = self.row(row)
        moved.length = length
        self.put(to, moved)

    def clear(self, row: int, length: int) -> None:
        """Row `row`, which has read `length` tokens, holds zeros again: what is no number would reach whoever has the
        row next, as 0 * NaN is NaN and masked slots are multiplied by 0."""
        for layer in self.layers:
            if layer is not None:
                layer.clear(row, length)

    def reorder(self, index: Tensor) -> None:
        """Row i becomes what row index[i] was; index (b,) of whole numbers."""
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
        """Stores the ids (b, s) of the tokens about to be read; returns those of all tokens so far (b, t)."""
        end = self.length + documents.shape[1]
        if self.documents is None:
            self.documents = documents.new_zeros(documents.shape[0], self.max_len)
        self.documents[:, self.length : end] = documents
        return self.documents[:, :end]

    def record_positions(self, positions: Tensor, before: Tensor) -> Tensor:
        """Stores the true positions (b, s) of the tokens about to be read, and those of the tokens `before` where none
        were stored; returns those of all tokens so far (b, t)."""
        end = self.length + positions.shape[-1]
        if self.positions is None:
            self.positions = positions.new_zeros(self.batch, self.max_len)
            self.positions[:, : self.length] = before
        self.positions[:, self.length : end] = positions
        return self.positions[:, :end]
