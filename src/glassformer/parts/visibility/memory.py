from __future__ import annotations

from torch import Tensor

from glassformer.parts.visibility.base import Visibility


class OfMemory(Visibility):
    """A query sees the tokens of another sequence that have its document's id; a query without a document sees every
    token but padding, whose id is 0.

    q_idx counts the tokens of the queries' sequence, k_idx those of the memory. documents (b, T) are the ids of the
    queries' sequence, or None; memory (b, t) those of the memory.
    """

    def __init__(self, documents: Tensor | None, memory: Tensor):
        self.documents, self.memory = documents, memory

    @property
    def key(self) -> tuple[type, bool]:
        return type(self), self.documents is None  # all layers of a pass read one memory

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        ids = self.memory[b, k_idx]
        if self.documents is None:
            return (ids != 0) & (q_idx == q_idx)
        return ids == self.documents[b, q_idx]

    def keys_seen(self, t: int) -> float:
        return float(t)
