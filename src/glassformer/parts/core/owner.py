"""What a part is told that becomes one owner's share of itself, and how owners' results are joined.

A branch that reads x, the same on every owner, and whose result is a sum over owners,

    y = f_1(enter(x)) + ... + f_w(enter(x)) = leave(f_r(x)),

is right in its values and gradients whatever f is: `enter` passes x on and adds up its gradients, `leave` adds up the
results and passes their gradient on (f and g of Shoeybi et al. 2019, 1909.08053). Weights that every owner has, inside
such a branch, get a share of their gradient from each (`parallel/tensor.py`).

A part whose class defines `divide(owner)` is such a branch: the walk has cut the parameters that it declares
(`parts/core/shard.py`), and it takes its share of whatever else it counts. Inside it, `take_share(owner)` of maps,
positions and norms does the same for these. A subclass defines `divide` anew: what it adds may not be divided alike. A
part that does not is computed whole by every owner. Parts know no processes: the functions are another's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.heads import divisors

Seam = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    """A seam of one owner alone."""
    return x


@dataclass(frozen=True)
class Vocabulary:
    """The tokens `first` .. `last`-1 of `size`, of which an owner has the rows.

    `most`: the largest over the owners, without a gradient; `gather`: logits (..., last - first) -> (..., size)."""

    size: int
    first: int
    last: int
    enter: Seam = same
    leave: Seam = same
    most: Seam = same
    gather: Seam = same

    def here(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of tokens, 0 for those of other owners, and which are this owner's."""
        inside = (tokens >= self.first) & (tokens < self.last)
        return (tokens - self.first).where(inside, 0), inside

    def log_z(self, logits: Tensor) -> Tensor:
        """(..., 1): log of the sum of exp(logits) over the tokens of all owners."""
        top = self.most(logits.detach().amax(-1, keepdim=True))
        return self.leave((logits - top).exp().sum(-1, keepdim=True)).log() + top


@dataclass(frozen=True)
class Owner:
    """One of `of` owners of a model's maps, and the seams between them; without seams, for shapes alone.

    enter         x -> x; gradients are added up
    leave         results are added up; their gradient -> itself
    enter_memory  as `enter`, of another sequence, which every owner has whole
    mix           results are added up, and their gradients too: inside a branch, before maps that are cut again
    most          the largest, without a gradient
    gather        (x, axis, size) -> the pieces of all owners along it; of the gradient, its own piece
    """

    number: int
    of: int
    enter: Seam = same
    leave: Seam = same
    enter_memory: Seam = same
    mix: Seam = same
    most: Seam = same
    gather: Callable[[Tensor, int, int], Tensor] = lambda x, axis, size: x

    def share(self, field: str, count: int) -> int:
        """An owner's share of so many heads, groups, channels. Raises RequestError where they cannot be shared."""
        if count % self.of:
            fitting = [str(n) for n in divisors(count) if n <= 2 * self.of][-4:]
            *most, last = fitting
            use = f"{', '.join(most)} or {last}" if most else last
            raise RequestError(
                f"tp={self.of} does not divide {field}={count}; use {use}",
                code="conflict", field="tp", value=self.of, expected=use,
            )  # fmt: skip
        return count // self.of

    def refuse(self, field: str, value: object, why: str) -> None:
        """Raises RequestError where a value cannot be divided."""
        if value and self.of > 1:
            raise RequestError(
                f"tp={self.of}: {field} {why}; use tp=1", code="conflict", field=field, value=value, expected="tp=1"
            )

    def vocabulary(self, size: int) -> Vocabulary:
        """The tokens whose rows it has, as `Shard("vocab")` cuts them."""
        first, last = self.number * size // self.of, (self.number + 1) * size // self.of
        if size < self.of:
            self.share("vocab_size", size)
        return Vocabulary(size, first, last, self.enter, self.leave, self.most, lambda x: self.gather(x, -1, size))


class Spread(Protocol):
    """How owners share the tokens of a stream (b, s, d)."""

    def spread(self, x: Tensor) -> Tensor:
        """(b, s, d), the same on every owner -> its own tokens (b, s', d)."""

    def gather(self, x: Tensor) -> Tensor:
        """(b, s', d) -> (b, s, d), which every owner goes on with alike."""


def reads_gathered(mixer: nn.Module) -> bool:
    """Whether a mixer's own class says that the keys and values which its state hands it may be of other processes."""
    return bool(vars(type(mixer)).get("reads_gathered", False))


def says_how(part: nn.Module) -> bool:
    """Whether a part's own class, and not one that it was made of, says how an owner takes its share."""
    return "divide" in vars(type(part))


def is_branch(part: nn.Module) -> bool:
    """Whether its input enters, as that of a mixer and of an FFN does."""
    return hasattr(part, "enter")


def take_share(inner: nn.Module, owner: Owner) -> None:
    """Has a module inside such a part take its share, where it counts anything besides its parameters."""
    if callable(take := getattr(inner, "take_share", None)):
        take(owner)


def of_owner(values: Sequence[float], owner: Owner) -> list[float]:
    """An owner's share of values for each head."""
    n = len(values) // owner.of
    return list(values[owner.number * n : (owner.number + 1) * n])
