from __future__ import annotations

from jaxtyping import Bool
from pydantic import Field
from torch import Tensor

from glassformer.errors import check_whole
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.words import Word, whole
from glassformer.parts.visibility.base import Spans, Visibility, VisibilityConfig
from glassformer.parts.visibility.causal import Causal


class Prefix(Visibility):
    """k <= q or k < length: the first `length` tokens of a document are seen by all, themselves included; the others
    see what came before.

    A prefix is read in the first call of a state, from which all later calls go on causally. Which tokens it has may
    also come with the text (`Model.forward`, `global_tokens`): rows then have prefixes of their own.
    """

    sees_itself = absolute = True

    def __init__(self, length: int):
        check_whole("length", length)
        self.length = length

    @property
    def going_on(self) -> Visibility:
        return Causal()

    @property
    def takes_prefix(self) -> bool:
        return True

    @property
    def takes_globals(self) -> bool:
        return True

    def of_globals(self, tokens: Tensor) -> Visibility:
        return ChosenPrefix(tokens)

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return (k_idx <= q_idx) | (k_idx < self.length)

    def spans(self, first: int, last: int, t: int) -> Spans:
        return [(0, min(t, max(last, self.length)))]

    def keys_seen(self, t: int) -> float:
        p = min(self.length, t)
        return (p * p + (t * (t + 1) - p * (p + 1)) / 2) / t


class ChosenPrefix(Visibility):
    """`Prefix` whose tokens a caller has named: k <= q or k is one of tokens (b, t), the first ones of each row."""

    sees_itself = True

    def __init__(self, tokens: Bool[Tensor, "b t"]):
        self.tokens = tokens.bool()

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return (k_idx <= q_idx) | self.tokens[b, k_idx]

    def keys_seen(self, t: int) -> float:
        return Prefix(max(1, round(float(self.tokens.sum(1).float().mean())))).keys_seen(t)


class PrefixConfig(VisibilityConfig, kind="prefix", words=Word("prefix", whole("length"), "16", optional=True)):
    """k <= q or k < length: the first `length` tokens of a document see each other, the others what came before. The
    prefix language model of Raffel et al. 2020 (1910.10683), 3.2.1: an answer is predicted from a question that is read
    both ways.

    It loses where every token is to be learned from: a token of the prefix sees the one after it, so only the others
    can be targets, and the same text teaches less than under a causal mask.
    """

    length: int | None = Field(None, gt=0, le=1 << 28)
    """None: half of the context."""

    def build(self, ctx: BuildContext) -> Prefix:
        return Prefix(self._length(ctx))

    def resolved(self, ctx: BuildContext) -> PrefixConfig:
        return self.replace(length=self._length(ctx))

    def _length(self, ctx: BuildContext) -> int:
        return self.length or max(1, ctx.context // 2)
