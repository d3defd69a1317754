"""State of one forward pass, which its layers share: positions, documents, memory and cached values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.kernel.base import Index
from glassformer.parts.loss import IGNORED
from glassformer.parts.visibility import Borders, SameDocument, Visibility


class Memory(NamedTuple):
    """Other sequence that cross-attention reads: x (b, t, m), and the document ids (b, t) of its tokens, 0 for padding;
    ids None if no token is padding."""

    x: Float[Tensor, "b t m"]
    documents: Int[Tensor, "b t"] | None = None

    def row(self, i: int) -> Memory:
        """Returns a memory of only row i of the batch, (1, t, m)."""
        return Memory(self.x[i : i + 1], None if self.documents is None else self.documents[i : i + 1])


class Pass:
    """One forward pass of s tokens: their positions, and values that its layers share.

    The model makes one pass object for every call and hands it to every layer.

    start, end  slots in the sequence: tokens start .. end-1, after `start` tokens read before (end = t)
    ids         (s,) or (b, s) true positions; they differ from slots for padded rows and packed documents
    documents   (b, t) ids of all tokens so far, or None when each row is one document
    rows        (b,) tokens that each row had read, if they differ; start is then the longest row's, and end is the
                number of slots that queries attend to
    given       (b, t) true positions of all tokens so far, if a caller passed them; None if they grow by one per slot
                within a document
    global_tokens  (b, t) True for global tokens, for a visibility that takes them (`Longformer`); None for its default
    memory      another sequence for layers that attend to one; None without one, or if a decode state has read it
    segments    (b, s) segment of each token (`embedding.segments`); None for all 0
    targets     (b, s) tokens to predict, if the caller knows them and no token depends on later ones; else None
    """

    def __init__(
        self,
        start: int,
        end: int,
        device: Any = None,
        ids: Tensor | None = None,
        documents: Tensor | None = None,
        rows: Tensor | None = None,
        tokens: int | None = None,
        given: Tensor | None = None,
        memory: Memory | None = None,
        global_tokens: Tensor | None = None,
        segments: Tensor | None = None,
    ):
        self.start, self.end, self.rows = start, end, rows
        self.tokens = end - start if tokens is None else tokens
        self._made: dict[Hashable, Any] = {}
        self._shared: dict[Hashable, Any] = {}
        self._device = device if ids is None else ids.device
        self.in_order = ids is None and rows is None
        """True if the new tokens have the positions start .. end-1 in every row."""
        self.ids = self.slots if ids is None else ids
        self.documents, self.given, self.memory, self.segments = documents, given, memory, segments
        self.global_tokens = global_tokens
        self.targets: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor) -> Pass:
        """Returns the pass of an input x (b, s, d) without earlier tokens, at positions 0 .. s-1, each row one
        document."""
        return cls(0, x.shape[1], x.device)

    @property
    def slots(self) -> Tensor:
        """Index of each new token in its row of the decode state or input, counted from the row's start: (s,); (b, s)
        if rows have read different numbers of tokens."""

        def make() -> Tensor:
            if self.rows is None:
                return torch.arange(self.start, self.end, device=self._device)
            return self.rows[:, None] + torch.arange(self.tokens, device=self._device)

        return self.once("slots", make)

    @property
    def age(self) -> Tensor:
        """Number of earlier tokens in the document of each new token, (1, s) or (b, s)."""

        def make() -> Tensor:
            if self.documents is None:
                return self.slots.reshape(-1, self.tokens)
            return position_in_document(self.documents)[:, self.start :]

        return self.once("age", make)

    @property
    def begins(self) -> Tensor | None:
        """Mask of the new tokens, True for the first token of each document, (1, s) or (b, s); None if each row is one
        document."""
        return None if self.documents is None else self.age == 0

    @property
    def real(self) -> Tensor | None:
        """Mask (b, s) of new tokens that are not padding: with documents, tokens of another document than 0; with
        targets, tokens up to the last counted target of their row; None without either."""

        def make() -> Tensor | None:
            if self.documents is not None:
                return self.documents[:, self.documents.shape[1] - self.tokens :] != 0
            return None if self.targets is None else (self.targets != IGNORED).flip(1).cumsum(1).flip(1) > 0

        return self.once("real", make)

    @property
    def borders(self) -> Borders:
        """Index of the borders between the documents of this pass; only for a pass with documents."""
        assert self.documents is not None
        documents = self.documents
        return self.once("borders", lambda: Borders(documents))

    def seen(self, visibility: Visibility) -> Visibility:
        """Returns `visibility`, an attention mask, as it applies in this pass: continuing a decode state, with the
        pass's global tokens and length, and with its documents separated."""
        if self.start or self.rows is not None:
            visibility = visibility.going_on
        if (tokens := self.global_tokens) is not None:
            own = visibility
            visibility = self.once(("globals", *own.key), lambda: own.of_globals(tokens))
        if self.documents is None:
            return visibility.sized(self.end)
        return SameDocument(visibility, self.documents, self.borders)

    def index(self, k_idx: Tensor | None) -> Index | None:
        return None if k_idx is None else (self.slots, k_idx)

    def need_memory(self) -> Memory:
        """Returns the other sequence that cross-attention reads in this pass. Raises RequestError for a pass without
        one."""
        if self.memory is None:
            raise RequestError(
                "this model reads another sequence in addition to its own: give a source, memory=Memory(x), or a "
                "state that has read one",
                code="missing", field="memory", expected="Memory(x (b, t, m), documents (b, t) or None)",
            )  # fmt: skip
        return self.memory

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns `make()`, computed by the first layer that requests `key` and kept for the rest of the pass."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def share(self, key: Hashable, value: Any) -> None:
        """Stores a value of the present layer under `key` for later layers of this pass, such as keys and values that
        they reuse."""
        self._shared[key] = value

    def shared(self, key: Hashable) -> Any:
        """Returns the value that an earlier layer of this pass has stored under `key` by `share`. Raises RequestError
        if no layer has."""
        if key not in self._shared:
            given = ", ".join(map(str, self._shared)) or "nothing"
            raise RequestError(
                f"no layer below has shared {key!r}; shared so far: {given}",
                code="missing", field=str(key), expected=given,
            )  # fmt: skip
        return self._shared[key]


LossOf = Callable[[Tensor, Tensor, str], Tensor]
"""Function of (x, targets, reduction) that returns the loss of the model's head."""


class Along(Protocol):
    """Interface of sequence parallelism: it divides the tokens of each sequence among several processes, from the first
    layer to the loss."""

    def begin(self, x: Tensor, pass_: Pass, layers: int) -> tuple[Tensor, Pass, Sequence[Any]]:
        """Returns the work of this process: its tokens (b, s', d) of the tokens x (b, s, d), their pass, and a state
        for each of the `layers` layers."""

    def loss(self, loss_of: LossOf, x: Tensor, targets: Tensor, reduction: str, added: Sequence[Tensor]) -> Tensor:
        """Returns the loss over the tokens of all processes, from x (b, s', d) of this process, the targets (b, s) of
        all tokens, and the auxiliary losses `added` of the parts."""

    def join(self, y: Tensor) -> Tensor:
        """Returns the outputs (b, s, v) of all tokens, from those of this process' tokens, y (b, s', v)."""


def position_in_document(documents: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """Returns the distance of each token from the first token of its document, a run of equal ids in `documents`: (b,
    t)."""
    return torch.arange(documents.shape[1], device=documents.device) - Borders(documents).begins
