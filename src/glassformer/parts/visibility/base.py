from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.precision import at_hand, traced

Spans = list[tuple[int, int]]
"""Intervals [begin, end) of keys, ascending, apart from each other."""


class Needed(NamedTuple):
    """The tokens that later queries may attend to: the first ones of their document, and the last ones before them. If
    None, all."""

    first: int
    last: int | None

    def most(self, t: int) -> int:
        """Of t tokens."""
        return t if self.last is None else min(t, self.first + self.last)


class Visibility:
    """visible(b, n, q_idx, k_idx) -> bool, the convention of `torch.nn.attention.flex_attention`.

    Arguments are integer tensors that broadcast together; indices count tokens from the start of the sequence.
    `causal` and `reach` tell kernels and states what they may skip: no key after its query is visible; no key `reach`
    or more tokens before its query is visible.
    """

    causal: bool = False
    reach: int | None = None

    only_order: bool = False
    """Whether `causal` and `reach` say all: nothing else hides a key."""
    sees_itself: bool = False
    """Whether every token attends to itself, so that no query is without a key."""
    absolute: bool = False
    """Whether it matters where a token stands in its document; otherwise only differences between places do."""
    tile: int | None = None
    """Queries see alike in blocks of so many tokens, counted from the start; None: in no blocks."""
    stride: int = 1
    """Tokens attend only to those whose distance is a multiple of it."""

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Equal for visibilities that are equal within one pass of the model: masks are made once for both. A tensor
        in it counts by identity."""
        if traced():  # torch 2.11 cannot trace `vars`; what is made twice the compiler makes once
            return (self,)
        return (type(self), *sorted(vars(self).items()))

    @property
    def needed(self) -> Needed:
        """What a decode state has to keep."""
        return Needed(0, self.reach)

    @property
    def width(self) -> int | None:
        """About how many keys most queries attend to at most; None: there is no bound."""
        return self.reach

    def sized(self, length: int | Tensor) -> Visibility:
        """The same for documents of `length` tokens, a number or a tensor that broadcasts with the indices; for those
        that depend on where a document ends."""
        return self

    @property
    def going_on(self) -> Visibility:
        """The keys that each query attends to in the calls that go on from a state, after the one that read the
        beginning."""
        return self

    @property
    def takes_prefix(self) -> bool:
        """Whether a token attends ahead within a prefix, whose tokens a caller may name (`of_globals`), and nowhere
        else."""
        return False

    @property
    def takes_globals(self) -> bool:
        """Whether a caller may say which tokens are global (`of_globals`)."""
        return False

    def of_globals(self, tokens: Tensor) -> Visibility:
        """The same with these tokens (b, t) global, True or False for each, where it has global tokens that a caller
        may choose."""
        return self

    def folded(self, rest: int) -> Visibility:
        """With a `stride`: the keys that each query attends to among every stride-th token, after `rest` tokens were
        added at the end."""
        raise NotImplementedError

    def cuts(self, t: int) -> tuple[int, ...]:
        """Queries of t tokens before which a block of queries should end, as they see more than those around them."""
        return ()

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        raise NotImplementedError

    def spans(self, first: int, last: int, t: int) -> Spans:
        """Intervals [begin, end) of keys, at least one, ascending and disjoint, outside of which none of the queries
        first .. last-1 of t tokens sees a key. By default they follow from `causal` and `reach`."""
        begin = 0 if self.reach is None else max(0, first - self.reach + 1)
        return [(begin, last if self.causal else t)]

    def sure(self, first: int, last: int, t: int) -> int:
        """How many keys at the beginning of their `spans` are visible to all of the queries first .. last-1."""
        return 0

    def alike(self, first: int, last: int, t: int) -> Hashable | None:
        """Equal for blocks of queries that see alike among the keys of their `spans`, so that a mask is made once; None
        where nothing is promised."""
        if not self.only_order:
            return None
        return last - first, *((begin - first, end - first) for begin, end in self.spans(first, last, t))

    def keys_seen(self, t: int) -> float:
        """Mean number of keys that a query of a t-token sequence sees."""
        raise NotImplementedError


class Borders:
    """Where the documents of a batch begin and end: runs of equal ids in documents (b, t)."""

    def __init__(self, documents: Tensor):
        self.documents = documents
        slot = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
        changes = documents[:, 1:] != documents[:, :-1]
        self._first = torch.cat((torch.ones_like(documents[:, :1], dtype=torch.bool), changes), 1)
        self.begins = torch.where(self._first, slot, 0).cummax(dim=1).values
        """(b, t): the first slot of each token's document."""
        self._lengths: Tensor | None = None
        self._runs: list[list[tuple[int, int]]] | None = None
        self._extent: tuple[Tensor, Tensor] | None = None

    @property
    def lengths(self) -> Tensor:
        """(b, t): how many tokens each token's document has."""
        if self._lengths is None:
            t = self.documents.shape[1]
            later = torch.where(self._first, torch.arange(t, device=self.documents.device), t)
            ends = torch.cat((later[:, 1:], torch.full_like(later[:, :1], t)), 1).flip(1).cummin(dim=1).values.flip(1)
            self._lengths = ends - self.begins
        return self._lengths

    @property
    def runs(self) -> list[list[tuple[int, int]]]:
        """[begin, end) of the documents of each row."""
        if self._runs is None:
            batch, t = self.documents.shape
            starts: list[list[int]] = [[] for _ in range(batch)]
            for row, slot in self._first.nonzero().tolist():
                starts[row].append(slot)
            self._runs = [list(zip(some, [*some[1:], t], strict=True)) for some in starts]
        return self._runs

    @property
    def extent(self) -> tuple[Tensor, Tensor]:
        """Of each slot (t,), over the rows: the first slot with its id, and the one after the last."""
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
    """Narrows another visibility to pairs in one document: packed batches, and padding (a document of its own). Where
    places matter to it, they count from the start of the document.

    documents (b, t) holds an id per token of the whole sequence so far. Two documents of one id that do not touch see
    each other, unless places matter.
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
        q, k = begins[b, q_idx], begins[b, k_idx.clamp(max=last)]  # an empty slot counts as a token yet to come
        return inner.visible(b, n, q_idx - q, k_idx - k) & (q == k)

    def spans(self, first: int, last: int, t: int) -> Spans:
        """On CPUs those of each document; elsewhere, and to a compiler, documents are not known in advance."""
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
        """The documents of slots first .. last-1, of all rows; one interval around them where places do not matter."""
        if self.inner.absolute:
            return sorted({run for runs in self.borders.runs for run in runs if run[0] < last and first < run[1]})
        low, high = self.borders.extent
        return [(int(low[first:last].min()), int(high[first:last].max()))]

    def keys_seen(self, t: int) -> float:
        return self.inner.keys_seen(t)


def joined(spans: Iterable[tuple[int, int]]) -> Spans:
    """The union of intervals, ascending and apart."""
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
