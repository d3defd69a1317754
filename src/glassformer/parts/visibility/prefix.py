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
    """Visibility with a bidirectional prefix, k <= q or k < length: all tokens attend to the first `length` tokens of a
    document; later tokens attend to earlier ones.

    A prefix is read in the first call of a state, which all later calls continue causally. The tokens of the prefix may
    also be passed with the text (`Model.forward`, `global_tokens`): rows then have separate prefixes.
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
    """Visibility like `Prefix` with a prefix chosen by the caller: k <= q or k is one of the tokens that the mask (b,
    t) marks, the first ones of each row."""

    sees_itself = True

    def __init__(self, tokens: Bool[Tensor, "b t"]):
        self.tokens = tokens.bool()

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return (k_idx <= q_idx) | self.tokens[b, k_idx]

    def keys_seen(self, t: int) -> float:
        return Prefix(max(1, round(float(self.tokens.sum(1).float().mean())))).keys_seen(t)


class PrefixConfig(VisibilityConfig, kind="prefix", words=Word("prefix", whole("length"), "16", optional=True)):
    """Config of a bidirectional prefix, k <= q or k < length: the first `length` tokens of a document attend to each
    other, later ones to all earlier tokens. The prefix language model of Raffel et al. 2020 (1910.10683), 3.2.1: an
    answer is predicted from a question that is read bidirectionally.

    It loses if every token should be a target: tokens of the prefix attend to the next one, so only later tokens can be
    targets, and a text has fewer targets than under a causal mask.
    """

    length: int | None = Field(None, gt=0, le=1 << 28)
    """Number of tokens of the prefix; None for half of the context."""

    def build(self, ctx: BuildContext) -> Prefix:
        return Prefix(self._length(ctx))

    def resolved(self, ctx: BuildContext) -> PrefixConfig:
        return self.replace(length=self._length(ctx))

    def _length(self, ctx: BuildContext) -> int:
        return self.length or max(1, ctx.context // 2)
