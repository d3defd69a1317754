"""Decode state: what a model keeps of the tokens it has read, so that the next ones need not read them again.

Every mixer allocates its own typed state; the model holds one per layer, outside the module tree, and passes it in.
States are preallocated and updated in place. One counter, `ModelState.length`, is advanced by the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class State(ABC):
    """One mixer's memory of b sequences."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated."""

    @abstractmethod
    def reorder(self, index: Tensor) -> None:
        """Row i becomes what row index[i] was (beam search); index (b,)."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forgets every token after the first `length` (rejected speculation)."""


class ModelState:
    """The states of all layers, the number of tokens read, and which document each token belongs to.

    layers     one State per layer, in order
    length     tokens read so far, equal in all rows (rows of unequal length are padded on the left)
    documents  (b, max_len) ids, present once a call has named documents
    offset     (b, 1): a row's first true position minus its slot, non-zero for left-padded rows
    """

    def __init__(self, layers: Sequence[State | None], batch: int, max_len: int):
        self.layers = list(layers)
        self.batch = batch
        self.max_len = max_len
        self.length = 0
        self.documents: Tensor | None = None
        self.offset: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes allocated by all layers."""
        return sum(layer.nbytes for layer in self.layers if layer is not None)

    def reorder(self, index: Tensor) -> None:
        for layer in self.layers:
            if layer is not None:
                layer.reorder(index)
        if self.documents is not None:
            self.documents = self.documents[index]
        if self.offset is not None:
            self.offset = self.offset[index]

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"truncate({length}) of a state that holds {self.length} tokens")
        for layer in self.layers:
            if layer is not None:
                layer.truncate(length)
        self.length = length
        if length == 0:
            self.documents = self.offset = None

    def record_documents(self, documents: Tensor) -> Tensor:
        """Stores the ids (b, s) of the tokens about to be read; returns those of all tokens so far (b, t)."""
        end = self.length + documents.shape[1]
        if self.documents is None:
            self.documents = documents.new_zeros(documents.shape[0], self.max_len)
        self.documents[:, self.length : end] = documents
        return self.documents[:, :end]


def index_select_(tensor: Tensor, index: Tensor) -> None:
    """tensor[i] <- tensor[index[i]] along the batch axis, in place."""
    tensor.copy_(torch.index_select(tensor, 0, index))
