from __future__ import annotations

from torch import Tensor

from glassformer.parts.visibility.base import Visibility


class OfMemory(Visibility):
    """Visibility of another sequence: a query attends to its tokens with the id of the query's document; a query
    without a document to all tokens except padding, whose id is 0.

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


class ChunksOfMemory(Visibility):
    """Visibility of retrieved neighbours (RETRO): a query attends to the neighbours of the last chunk that ended before
    or at the query, so of the chunk that they were retrieved for only the last token reads them. Borgeaud et al. 2021,
    2112.04426, section 2.4.

    The sequence is cut into chunks of m tokens, u = 0, 1, ..., and the memory has w tokens for each. Query i attends to
    key j where j // w = (i + 1) // m - 1, so the first m - 1 queries attend to nothing. memory (b, t) is 0 for padding
    tokens of the memory; None without padding.
    """

    def __init__(self, chunk: int, width: int, memory: Tensor | None = None):
        self.chunk, self.per_chunk, self.memory = chunk, width, memory

    @property
    def key(self) -> tuple[type, int, int, bool]:
        return type(self), self.chunk, self.per_chunk, self.memory is None  # all layers of a pass read one memory

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        mine = k_idx // self.per_chunk == (q_idx + 1) // self.chunk - 1
        return mine if self.memory is None else mine & (self.memory[b, k_idx] != 0)

    def keys_seen(self, t: int) -> float:
        """Returns the mean number of memory tokens that one of t queries attends to."""
        return self.per_chunk * max(0, t - self.chunk + 1) / max(t, 1)
