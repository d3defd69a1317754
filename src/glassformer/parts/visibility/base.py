from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from glassformer.parts.base import BuildContext, PartConfig


class Visibility:
    """visible(b, n, q_idx, k_idx) -> bool, the convention of `torch.nn.attention.flex_attention`.

    Arguments are integer tensors that broadcast together; indices count tokens from the start of the sequence, so
    only differences matter to the masks here. `causal` and `reach` tell kernels and states what they may skip:
    no key after its query is visible; no key `reach` or more tokens before its query is visible.
    """

    causal: bool = False
    reach: int | None = None

    only_order: bool = False
    """Whether `causal` and `reach` say all: nothing else hides a key."""
    sees_itself: bool = False
    """Whether every token sees itself, so that no query is without a key."""

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Equal for visibilities that are equal within one pass of the model: masks are made once for both. A tensor
        in it counts by identity."""
        return (type(self), *sorted(vars(self).items()))

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        raise NotImplementedError

    def spans(self, first: int, last: int, t: int) -> list[tuple[int, int]]:
        """Intervals [begin, end) of keys, at least one, ascending and disjoint, outside of which none of the queries
        first .. last-1 of t tokens sees a key. By default they follow from `causal` and `reach`."""
        begin = 0 if self.reach is None else max(0, first - self.reach + 1)
        return [(begin, last if self.causal else t)]

    def keys_seen(self, t: int) -> float:
        """Mean number of keys that a query of a t-token sequence sees."""
        raise NotImplementedError


class SameDocument(Visibility):
    """Narrows another visibility to pairs in one document: packed batches, and padding (a document of its own).

    documents (b, t) holds an id per token of the whole sequence so far.
    """

    def __init__(self, inner: Visibility, documents: Tensor):
        self.inner = inner
        self.documents = documents
        self.causal, self.reach, self.sees_itself = inner.causal, inner.reach, inner.sees_itself

    @property
    def key(self) -> tuple[Hashable, ...]:
        return (type(self), *self.inner.key, self.documents)

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        same = self.documents[b, q_idx] == self.documents[b, k_idx]
        return self.inner.visible(b, n, q_idx, k_idx) & same

    def spans(self, first: int, last: int, t: int) -> list[tuple[int, int]]:
        return self.inner.spans(first, last, t)


class VisibilityConfig(PartConfig, axis="visibility"):
    def build(self, ctx: BuildContext) -> Visibility:
        raise NotImplementedError
