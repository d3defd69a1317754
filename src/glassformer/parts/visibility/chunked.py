from __future__ import annotations

from collections.abc import Hashable

from pydantic import Field
from torch import Tensor

from glassformer.errors import check_whole
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.words import Word, whole
from glassformer.parts.visibility.base import Spans, Visibility, VisibilityConfig


class Chunked(Visibility):
    """Visibility within chunks, k <= q and k // chunk == q // chunk: a document is divided into chunks that do not
    attend to each other.

    A query attends to (chunk + 1) / 2 keys on average, and a decode state keeps `chunk` tokens.
    """

    causal = sees_itself = absolute = True

    def __init__(self, chunk: int):
        check_whole("chunk", chunk)
        self.chunk = self.reach = self.tile = chunk

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return (k_idx <= q_idx) & (q_idx // self.chunk == k_idx // self.chunk)

    def spans(self, first: int, last: int, t: int) -> Spans:
        return [(first // self.chunk * self.chunk, last)]

    def sure(self, first: int, last: int, t: int) -> int:
        return first % self.chunk if (last - 1) // self.chunk == first // self.chunk else 0

    def alike(self, first: int, last: int, t: int) -> Hashable:
        return first % self.chunk, last - first

    def keys_seen(self, t: int) -> float:
        whole, rest = divmod(t, self.chunk)
        return (whole * self.chunk * (self.chunk + 1) + rest * (rest + 1)) / 2 / t


class ChunkedConfig(VisibilityConfig, kind="chunked", words=Word("chunked", whole("chunk"), "256")):
    """Config of visibility within chunks: k <= q and k // chunk == q // chunk, counted from the start of a document:
    three of four layers of Llama 4 (Meta 2025) are so, between layers that attend to everything.

    It loses if an answer is across a border: the first token of a chunk attends only to itself, and more such layers do
    not help, because all have the same borders.
    """

    chunk: int = Field(gt=0, le=1 << 28)

    def build(self, ctx: BuildContext) -> Chunked:
        return Chunked(self.chunk)
