from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.precision import at_hand, traced

Spans = list[tuple[int, int]]
"""Intervals [start, end) of keys, ascending and disjoint."""


class Needed(NamedTuple):
    """Range of tokens that later queries may attend to: the `first` tokens of their document, and the `last` tokens
    before the query; `last` None for all tokens."""

    first: int
    last: int | None

    def most(self, t: int) -> int:
        """Returns the largest number of tokens in this range, in a text of t tokens."""
        return t if self.last is None else min(t, self.first + self.last)


class Visibility:
    """Attention mask, a function visible(b, n, q_idx, k_idx) -> bool of row, head, query and key, in the convention of
    `torch.nn.attention.flex_attention`.

    Arguments are integer tensors that broadcast together; indices count tokens from the start of the sequence. `causal`
    and `reach` are promises to kernels and states: no key after its query is visible; no key `reach` or more tokens
    before its query is visible.
    """

    causal: bool = False
    reach: int | None = None

    only_order: bool = False
    """True if keys are hidden only by `causal` and `reach`."""
    sees_itself: bool = False
    """True if every token attends to itself, so that every query has a key."""
    absolute: bool = False
    """True if visibility depends on the place of a token in its document, not only on differences between places."""
    tile: int | None = None
    """Number of queries in a block with equal visibility, blocks counted from the start of the sequence; None without
    such blocks."""
    stride: int = 1
    """Distance between visible keys: a token attends only to tokens at a multiple of this distance."""

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Hashable key, equal for visibilities that are equal within one pass of the model, so that each mask is made
        once. Tensors are compared by identity."""
        if traced():  # torch 2.11 cannot trace `vars`; the compiler merges equal masks itself
            return (self,)
        return (type(self), *sorted(vars(self).items()))

    @property
    def needed(self) -> Needed:
        """Range of tokens that a decode state has to keep for later queries."""
        return Needed(0, self.reach)

    @property
    def width(self) -> int | None:
        """Approximate bound on the number of keys that most queries attend to; None without a bound."""
        return self.reach

    def sized(self, length: int | Tensor) -> Visibility:
        """Returns this visibility for documents of `length` tokens, a number or a tensor that broadcasts with the
        indices; for masks that depend on the end of a document."""
        return self

    @property
    def going_on(self) -> Visibility:
        """Visibility for calls that continue a decode state, after the call that read the start of the sequence."""
        return self

    @property
    def takes_prefix(self) -> bool:
        """True if tokens attend to later tokens only within a prefix, which a caller may mark (`of_globals`)."""
        return False

    @property
    def takes_globals(self) -> bool:
        """True if a caller may name the global tokens (`of_globals`)."""
        return False

    def of_globals(self, tokens: Tensor) -> Visibility:
        """Returns this visibility with the global tokens given by the mask `tokens` (b, t); unchanged if a caller may
        not choose them."""
        return self

    def folded(self, rest: int) -> Visibility:
        """Returns the visibility among every `stride`-th token of a sequence that was padded by `rest` tokens at the
        end; only for a visibility with a stride."""
        raise NotImplementedError

    def cuts(self, t: int) -> tuple[int, ...]:
        """Returns indices of queries, of t tokens, at which a kernel's block of queries should end, because the queries
        from there attend to more keys than their neighbours."""
        return ()

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        raise NotImplementedError

    def spans(self, first: int, last: int, t: int) -> Spans:
        """Returns intervals [start, end) of keys, at least one, ascending and disjoint, that contain every key to which
        one of the queries first .. last-1 of t tokens attends. By default they follow from `causal` and `reach`."""
        begin = 0 if self.reach is None else max(0, first - self.reach + 1)
        return [(begin, last if self.causal else t)]

    def sure(self, first: int, last: int, t: int) -> int:
        """Returns the number of keys, of the first of `spans(first, last, t)`, that are visible to all of the queries
        first .. last-1."""
        return 0

    def alike(self, first: int, last: int, t: int) -> Hashable | None:
        """Returns a hashable key of the mask of the queries first .. last-1 over the keys of their `spans`: blocks of
        queries with equal keys share one mask. None if no other block is known to have an equal mask."""
        if not self.only_order:
            return None
        return last - first, *((begin - first, end - first) for begin, end in self.spans(first, last, t))

    def keys_seen(self, t: int) -> float:
        """Returns the mean number of keys that a query attends to in a sequence of t tokens."""
        raise NotImplementedError


class Borders:
    """Borders of the documents of a batch: runs of equal ids in documents (b, t)."""

    def __init__(self, documents: Tensor):
        self.documents = documents
        slot = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
        changes = documents[:, 1:] != documents[:, :-1]
        self._first = torch.cat((torch.ones_like(documents[:, :1], dtype=torch.bool), changes), 1)
        self.begins = torch.where(self._first, slot, 0).cummax(dim=1).values
        """Index of the first slot of each token's document, (b, t)."""
        self._lengths: Tensor | None = None
        self._runs: list[list[tuple[int, int]]] | None = None
        self._extent: tuple[Tensor, Tensor] | None = None

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each token's document, (b, t)."""
        if self._lengths is None:
            t = self.documents.shape[1]
            later = torch.where(self._first, torch.arange(t, device=self.documents.device), t)
            ends = torch.cat((later[:, 1:], torch.full_like(later[:, :1], t)), 1).flip(1).cummin(dim=1).values.flip(1)
            self._lengths = ends - self.begins
        return self._lengths

    @property
    def runs(self) -> list[list[tuple[int, int]]]:
        """Intervals [start, end) of slots that the documents occupy, a list for each row."""
        if self._runs is None:
            batch, t = self.documents.shape
            starts: list[list[int]] = [[] for _ in range(batch)]
            for row, slot in self._first.nonzero().tolist():
                starts[row].append(slot)
            self._runs = [list(zip(some, [*some[1:], t], strict=True)) for some in starts]
        return self._runs

    @property
    def extent(self) -> tuple[Tensor, Tensor]:
        """Tuple (first, end), each (t,), over all rows: the first slot whose token has the same id as slot i, and the
        slot after the last such."""
        if self._extent is None:
            t = self.documents.shape[1]
            slot = torch.arange(t, device=self.documents.device).expand_as(self.documents)
            ids = torch.unique(self.documents, return_inverse=True)[1]
            count = int(ids.max()) + 1
            low, high = (ids.new_full((len(ids), count), filling) for filling in (t, 0))
            low = low.scatter_reduce(1, ids, slot, "amin").gather(1, ids)
            high = high.scatter_reduce(1, ids, slot + 1, "amax").gather(1, ids)
            self._extent = low.amin(0), high.amax(0)
        return self._extent


class SameDocument(Visibility):
    """Visibility restricted to pairs in one document: for packed batches, and padding (a separate document). If the
    inner visibility depends on places, they count from the start of the document.

    documents (b, t) holds an id per token of the whole sequence so far. Two separate documents with one id attend to
    each other, unless the visibility depends on places.
    """

    def __init__(self, inner: Visibility, documents: Tensor, borders: Borders | None = None):
        self.inner = inner
        self.documents = documents
        self._borders = borders
        self.causal, self.reach, self.sees_itself = inner.causal, inner.reach, inner.sees_itself
        self.absolute, self.tile, self.stride = inner.absolute, inner.tile, inner.stride

    @property
    def borders(self) -> Borders:
        if self._borders is None:
            self._borders = Borders(self.documents)
        return self._borders

    @property
    def key(self) -> tuple[Hashable, ...]:
        return (type(self), *self.inner.key, self.documents)

    @property
    def needed(self) -> Needed:
        return self.inner.needed

    @property
    def width(self) -> int | None:
        return self.inner.width

    def folded(self, rest: int) -> SameDocument:
        ids = torch.cat((self.documents, self.documents[:, -1:].expand(-1, rest)), 1)
        ids = ids.unflatten(1, (-1, self.stride)).transpose(1, 2).flatten(0, 1)
        return SameDocument(self.inner.folded(rest), ids)

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        if not self.inner.absolute:
            same = self.documents[b, q_idx] == self.documents[b, k_idx]
            return self.inner.visible(b, n, q_idx, k_idx) & same
        begins, last = self.borders.begins, self.documents.shape[1] - 1
        inner = self.inner.sized(self.borders.lengths[b, q_idx])
        q, k = begins[b, q_idx], begins[b, k_idx.clamp(max=last)]  # an empty slot counts as a future token
        return inner.visible(b, n, q_idx - q, k_idx - k) & (q == k)

    def spans(self, first: int, last: int, t: int) -> Spans:
        """Returns the intervals of keys for queries first .. last-1: on CPUs, only intervals in the documents of these
        queries; on other devices, and to a compiler, documents are not known in advance."""
        if not at_hand(self.documents):
            return [(0, last if self.causal else t)] if self.inner.absolute else self.inner.spans(first, last, t)
        reached = self._reached(first, last)
        if not self.inner.absolute:
            return joined((max(a, c), min(b, d)) for a, b in self.inner.spans(first, last, t) for c, d in reached)
        found: Spans = []
        for begin, end in reached:
            inner, low, high = self.inner.sized(end - begin), max(first, begin) - begin, min(last, end) - begin
            found += [(begin + one, begin + other) for one, other in inner.spans(low, high, end - begin)]
        return joined(found)

    def _reached(self, first: int, last: int) -> Spans:
        """Returns the intervals [start, end) of the documents, in all rows, that have tokens at indices first ..
        last-1; a single interval around these documents if visibility does not depend on a token's place in its
        document."""
        if self.inner.absolute:
            return sorted({run for runs in self.borders.runs for run in runs if run[0] < last and first < run[1]})
        low, high = self.borders.extent
        return [(int(low[first:last].min()), int(high[first:last].max()))]

    def keys_seen(self, t: int) -> float:
        return self.inner.keys_seen(t)


def joined(spans: Iterable[tuple[int, int]]) -> Spans:
    """Returns the union of intervals as a list of disjoint ones, ascending."""
    made: Spans = []
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if made and begin <= made[-1][1]:
            made[-1] = (made[-1][0], max(end, made[-1][1]))
        else:
            made.append((begin, end))
    return made


class VisibilityConfig(PartConfig, axis="visibility"):
    def build(self, ctx: BuildContext) -> Visibility:
        raise NotImplementedError
