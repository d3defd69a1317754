from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

from pydantic import Field
from torch import Tensor

from glassformer.errors import RequestError, check_whole
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.words import Word, whole_number
from glassformer.parts.visibility.base import Spans, Visibility, VisibilityConfig, joined


class BigBird(Visibility):
    """Visibility by blocks of `block` tokens, which attend to the global ones, their neighbours, and `random` others.
    Zaheer et al. 2020 (2007.14062).

    two-sided    block i of m attends to 0, i-1, i, i+1, m-1 and `random` others; blocks 0 and m-1 attend to
                 everything; with at most 5 + 2 `random` blocks, all do, as in the published class
    causal       k <= q, and block i attends to 0, i-1, i and `random` of those between: ours, because the paper's
                 decoders attend to all

    The random blocks depend on (seed, layer, i) and are equal for all heads and rows, and in the causal form for all
    lengths: the blocks to choose from are cut into `random` equal parts, and one block of each is drawn. If there are
    few blocks, all are visible.
    """

    sees_itself = absolute = True

    def __init__(
        self, block: int, random: int = 3, seed: int = 0, layer: int = 0, causal: bool = True,
        length: int | Tensor | None = None,
    ):  # fmt: skip
        check_whole("block", block)
        check_whole("random", random, 0)
        self.block = self.tile = block
        self.random, self.seed, self.layer, self.causal = random, seed, layer, causal
        self.length = length

    @property
    def few(self) -> int:
        """Largest number of blocks in a text for which every block attends to all, in the two-sided form."""
        return 5 + 2 * self.random

    def sized(self, length: int | Tensor) -> BigBird:
        if self.causal:
            return self
        return BigBird(self.block, self.random, self.seed, self.layer, False, length)

    @property
    def width(self) -> int:
        return (self.random + (3 if self.causal else 5)) * self.block

    def visible(self, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        i, j = q_idx // self.block, k_idx // self.block
        near = (j == 0) | ((i - j).abs() <= 1)
        if self.causal:
            near = near | (i < 0)
        else:
            m = self._blocks(self.length)
            near = near | (j == m - 1) | (i == 0) | (i == m - 1) | (m <= self.few)
        for part in range(self.random):
            drawn, there = self.drawn(i, part)
            near = near | ((j == drawn) & there)
        return near & (k_idx <= q_idx) if self.causal else near

    def drawn(self, i: Any, part: int) -> tuple[Any, Any]:
        """Returns (index, exists) of one of the random blocks that query block i attends to: the one drawn from part
        `part`, 0 to random - 1, of its candidate blocks. exists is False if that part has no block; i is a number or a
        tensor."""
        if self.causal:
            low = i - 2 + (i < 2) * (2 - i)
            choice = low  # blocks 1 .. i-2
        else:
            m = self._blocks(self.length)
            low = i - 2 + (i < 2) * (2 - i)
            high = m - 3 - i + (m - 3 < i) * (i + 3 - m)  # blocks i+2 .. m-2
            choice = low + high
        begin, end = part * choice // self.random, (part + 1) * choice // self.random
        there = begin < end
        at = begin + _mixed(self.seed, self.layer, i, part) % (end - begin + (end == begin) * 1)
        skipped = 3 - (i < 2) * (2 - i)  # blocks around i; block 0 is not drawn
        return 1 + at + (at >= low) * skipped, there

    def spans(self, first: int, last: int, t: int) -> Spans:
        sized = self.sized(t)
        some = {j for i in range(first // self.block, (last - 1) // self.block + 1) for j in sized.row(i, t)}
        ends = last if self.causal else t
        return joined((j * self.block, min((j + 1) * self.block, ends)) for j in some)

    def sure(self, first: int, last: int, t: int) -> int:
        i = first // self.block
        if (last - 1) // self.block != i:
            return 0
        keys = sum(end - begin for begin, end in self.spans(first, last, t))
        return keys - (last - i * self.block) if self.causal else keys

    def alike(self, first: int, last: int, t: int) -> Hashable | None:
        i, begin = divmod(first, self.block)
        return (begin, last - first) if (last - 1) // self.block == i else None

    def row(self, i: int, t: int) -> set[int]:
        """Returns the indices of the blocks that block i attends to in a text of t tokens, as a set."""
        m = (t + self.block - 1) // self.block
        if not self.causal and (i in (0, m - 1) or m <= self.few):
            return set(range(m))
        drawn = {int(block) for block, there in (self.drawn(i, part) for part in range(self.random)) if there}
        if self.causal:
            return {0, max(i - 1, 0), i} | drawn
        return {0, i - 1, i, i + 1, m - 1} | drawn

    def keys_seen(self, t: int) -> float:
        return _keys_seen(self.sized(t), t)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BigBird) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.block, self.random, self.seed, self.layer, self.causal))

    def _blocks(self, length: Any) -> Any:
        if length is None:
            raise RequestError(
                "a two-sided bigbird depends on where a text ends; ask it with sized(length)",
                code="missing", field="length", expected="the number of tokens",
            )  # fmt: skip
        return (length + self.block - 1) // self.block


@lru_cache(maxsize=64)
def _keys_seen(visibility: BigBird, t: int) -> float:
    block, pairs = visibility.block, 0
    for begin in range(0, t, block):
        queries = min(block, t - begin)
        for j in visibility.row(begin // block, t):
            own = visibility.causal and j * block == begin
            pairs += queries * (queries + 1) // 2 if own else queries * min(block, t - j * block)
    return pairs / t


def _mixed(*numbers: Any) -> Any:
    """Returns a pseudo-random hash, in 0 .. 2^32 - 1, of integers below 2^32; one of the integers may be a tensor."""
    x: Any = 0x9E3779B9
    for number in numbers:
        x = x ^ (number.long() if isinstance(number, Tensor) else number)
        for _ in range(2):
            x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
        x = (x >> 16) ^ x
    return x


def _read(word: str, text: str) -> dict[str, Any]:
    block, colon, random = text.partition(":")
    found = {"block": whole_number(word, block)}
    return {**found, "random": whole_number(word, random)} if colon else found


class BigBirdConfig(VisibilityConfig, kind="bigbird", words=Word("bigbird", _read, "64")):
    """Config of BigBird's visibility: k <= q, and block i of `block` tokens attends to the blocks 0, i-1, i and
    `random` others. With causal=False it attends to 0, i-1, i, i+1, the last and `random` others, and blocks 0 and last
    attend to everything, as Zaheer et al. 2020 (2007.14062) published it.

    It loses if one far token decides: most of the far text is invisible to a layer, and yet a decode state keeps all of
    it, because any of it may be drawn later.
    """

    block: int = Field(gt=0, le=1 << 24)
    random: int = Field(3, ge=0, le=1 << 10)
    """Number of random blocks that each block attends to."""
    seed: int = Field(0, ge=0, lt=1 << 32)
    causal: bool = True

    def build(self, ctx: BuildContext) -> BigBird:
        return BigBird(self.block, self.random, self.seed, ctx.layer, self.causal)
