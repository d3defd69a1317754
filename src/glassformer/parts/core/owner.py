"""Division of a part among tensor-parallel ranks ("owners"), and the functions that join their results.

A branch that reads x, equal on every owner, and whose result is a sum over owners,

    y = f_1(enter(x)) + ... + f_w(enter(x)) = leave(f_r(x)),

has correct values and gradients for any f: `enter` passes x on and sums its gradients, `leave` sums the results and
passes their gradient on (f and g of Shoeybi et al. 2019, 1909.08053). Weights that every owner has, inside such a
branch, get a share of their gradient from each (`parallel/tensor.py`).

A part whose class defines `divide(owner)` is such a branch: the parameters that it declares are already cut
(`parts/core/shard.py`), and it takes its share of everything else that it counts. `take_share(owner)` does the same for
linear layers, positions and norms inside. A subclass must define `divide` again, because its additions may need another
division. A part that does not is computed whole by every owner. Parts do not know processes: the functions are passed
in.
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
    """Returns x: the communication of a single owner."""
    return x


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary share of an owner: tokens `first` .. `last`-1 of `size`, whose rows it has.

    `most`: maximum over the owners, without a gradient; `gather`: logits (..., last - first) -> (..., size)."""

    size: int
    first: int
    last: int
    enter: Seam = same
    leave: Seam = same
    most: Seam = same
    gather: Seam = same

    def here(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the local row of each token, 0 for tokens of other owners, and a mask of this owner's tokens."""
        inside = (tokens >= self.first) & (tokens < self.last)
        return (tokens - self.first).where(inside, 0), inside

    def log_z(self, logits: Tensor) -> Tensor:
        """Returns log of the sum of exp(logits) over the tokens of all owners, (..., 1)."""
        top = self.most(logits.detach().amax(-1, keepdim=True))
        return self.leave((logits - top).exp().sum(-1, keepdim=True)).log() + top


@dataclass(frozen=True)
class Owner:
    """Owner number `number` of `of` owners of a model's linear layers, with their communication; without it, only for
    shapes.

    enter         x -> x; gradients are summed
    leave         results are summed; their gradient passes unchanged
    enter_memory  `enter` for the other sequence, which every owner has whole
    mix           results are summed, and their gradients too: inside a branch, before layers that are cut again
    most          maximum, without a gradient
    gather        (x, axis, size) -> the shards of all owners along the axis; the gradient is cut to the own shard
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
        """Returns an owner's share of `count` heads, groups or channels. Raises RequestError if they cannot be
        shared."""
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
        """Raises RequestError if a value is set that cannot be divided, and there are several owners."""
        if value and self.of > 1:
            raise RequestError(
                f"tp={self.of}: {field} {why}; use tp=1", code="conflict", field=field, value=value, expected="tp=1"
            )

    def vocabulary(self, size: int) -> Vocabulary:
        """Returns the tokens whose rows the owner has, as `Shard("vocab")` cuts them."""
        first, last = self.number * size // self.of, (self.number + 1) * size // self.of
        if size < self.of:
            self.share("vocab_size", size)
        return Vocabulary(size, first, last, self.enter, self.leave, self.most, lambda x: self.gather(x, -1, size))


class Spread(Protocol):
    """Division of the tokens of a stream (b, s, d) among owners."""

    def spread(self, x: Tensor) -> Tensor:
        """Returns the owner's tokens (b, s', d) of x (b, s, d), which is equal on every owner."""

    def gather(self, x: Tensor) -> Tensor:
        """Returns all tokens (b, s, d) on every owner, from the owner's tokens (b, s', d)."""


def reads_gathered(mixer: nn.Module) -> bool:
    """Returns True if the mixer's own class declares that keys and values from its state may be of other processes."""
    return bool(vars(type(mixer)).get("reads_gathered", False))


def says_how(part: nn.Module) -> bool:
    """Returns True if the part's class itself, not a base class, defines its division."""
    return "divide" in vars(type(part))


def is_branch(part: nn.Module) -> bool:
    """Returns True if the part's input passes `enter`, as that of a mixer or an FFN does."""
    return hasattr(part, "enter")


def take_share(inner: nn.Module, owner: Owner) -> None:
    """Divides a module inside such a part, if it counts anything other than its parameters."""
    if callable(take := getattr(inner, "take_share", None)):
        take(owner)


def of_owner(values: Sequence[float], owner: Owner) -> list[float]:
    """Returns an owner's share of a list of values per head."""
    n = len(values) // owner.of
    return list(values[owner.number * n : (owner.number + 1) * n])
