"""What the layers of one forward pass share."""

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
    """Another sequence that layers read beside their own: x (b, t, m), and the document ids (b, t) of its tokens, 0 for
    padding; None: every token is real."""

    x: Float[Tensor, "b t m"]
    documents: Int[Tensor, "b t"] | None = None

    def row(self, i: int) -> Memory:
        """That of row i alone."""
        return Memory(self.x[i : i + 1], None if self.documents is None else self.documents[i : i + 1])


class Pass:
    """One forward pass of s tokens: their positions, and what its layers share.

    The model makes one for every call and hands it to every layer.

    start, end  slots in the sequence: tokens start .. end-1, after `start` tokens read before (end = t)
    ids         (s,) or (b, s) true positions; they differ from slots for padded rows and packed documents
    documents   (b, t) ids of all tokens so far, or None when each row is one document
    rows        (b,) tokens that each row had read, where they differ; start is then the longest row's, and end is the
                number of slots that queries look at
    given       (b, t) true positions of all tokens so far, where a caller gave them; None: within a document they go up
                by one from slot to slot
    global_tokens  (b, t) whether each token is global, for a visibility that takes them (`Longformer`); None: its own
    memory      another sequence for layers that read one; None: there is none, or a decode state has read it
    segments    (b, s) which kind of text each token belongs to (`embedding.segments`); None: all to the first
    targets     (b, s) what is to be predicted, where the caller knows and no token depends on later ones; None: unknown
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
        self.ids = self.slots if ids is None else ids
        self.documents, self.given, self.memory, self.segments = documents, given, memory, segments
        self.global_tokens = global_tokens
        self.targets: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor) -> Pass:
        """A pass of x (b, s, d) at positions 0 .. s-1."""
        return cls(0, x.shape[1], x.device)

    @property
    def slots(self) -> Tensor:
        """(s,) slot of each token; (b, s) where rows differ."""

        def make() -> Tensor:
            if self.rows is None:
                return torch.arange(self.start, self.end, device=self._device)
            return self.rows[:, None] + torch.arange(self.tokens, device=self._device)

        return self.once("slots", make)

    @property
    def age(self) -> Tensor:
        """Each token's distance from the start of its document, (1, s) or (b, s)."""

        def make() -> Tensor:
            if self.documents is None:
                return self.slots.reshape(-1, self.tokens)
            return position_in_document(self.documents)[:, self.start :]

        return self.once("age", make)

    @property
    def begins(self) -> Tensor | None:
        """Whether a document begins at each token, (1, s) or (b, s); None where each row is one document."""
        return None if self.documents is None else self.age == 0

    @property
    def real(self) -> Tensor | None:
        """(b, s) which tokens are no padding: those of no document 0, and without documents those up to the last
        target of a row that counts; None where nobody has said."""

        def make() -> Tensor | None:
            if self.documents is not None:
                return self.documents[:, self.documents.shape[1] - self.tokens :] != 0
            return None if self.targets is None else (self.targets != IGNORED).flip(1).cumsum(1).flip(1) > 0

        return self.once("real", make)

    @property
    def borders(self) -> Borders:
        """Where its documents begin and end."""
        assert self.documents is not None
        documents = self.documents
        return self.once("borders", lambda: Borders(documents))

    def seen(self, visibility: Visibility) -> Visibility:
        """The keys that each query attends to in this pass, its documents apart."""
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
        """The memory. Raises RequestError where there is none."""
        if self.memory is None:
            raise RequestError(
                "this model reads another sequence beside its own: give a source, memory=Memory(x), or a state that "
                "has read one",
                code="missing", field="memory", expected="Memory(x (b, t, m), documents (b, t) or None)",
            )  # fmt: skip
        return self.memory

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of `make()`, computed by the first layer that asks for `key` and kept for the rest of the pass."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def share(self, key: Hashable, value: Any) -> None:
        """Hands a value of this layer to the layers above, as where they attend to one layer's keys and values."""
        self._shared[key] = value

    def shared(self, key: Hashable) -> Any:
        """What a layer below has shared. Raises RequestError where none has."""
        if key not in self._shared:
            given = ", ".join(map(str, self._shared)) or "nothing"
            raise RequestError(
                f"no layer below has shared {key!r}; shared so far: {given}",
                code="missing", field=str(key), expected=given,
            )  # fmt: skip
        return self._shared[key]


LossOf = Callable[[Tensor, Tensor, str], Tensor]
"""(x, targets, reduction) -> loss."""


class Along(Protocol):
    """How several processes share the tokens of each sequence, from the first layer to the loss."""

    def begin(self, x: Tensor, pass_: Pass, layers: int) -> tuple[Tensor, Pass, Sequence[Any]]:
        """Of all tokens x (b, s, d): this process' own (b, s', d), where they stand, and a state for each layer."""

    def loss(self, loss_of: LossOf, x: Tensor, targets: Tensor, reduction: str, added: Sequence[Tensor]) -> Tensor:
        """The loss of all tokens, of this process' x (b, s', d) and all targets (b, s), with what parts have added."""

    def join(self, y: Tensor) -> Tensor:
        """(b, s', v) of each process -> (b, s, v)."""


def position_in_document(documents: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """Each token's distance from the start of its run of equal ids."""
    return torch.arange(documents.shape[1], device=documents.device) - Borders(documents).begins
