"""Division of a part among tensor-parallel ranks ("owners"), and the functions that join their results.

A branch that reads x, equal on every owner, and whose result is a sum over owners,

    y = f_1(enter(x)) + ... + f_w(enter(x)) = leave(f_r(x)),

has correct values and gradients for any f: `enter` passes x on and sums its gradients, `leave` sums the results and
passes their gradient on (f and g of Shoeybi et al. 2019, 1909.08053). Weights that every owner has, inside such a
branch, get a share of their gradient from each (`parallel/tensor.py`).

A part whose class defines `divide(owner)` is such a branch: its parameters with declared cuts are already reduced to
this owner's shards (`parts/core/shard.py`), and `divide` reduces everything else that it counts, such as heads.
`take_share(owner)` does the same for linear layers, positions and norms inside the part. A subclass must define
`divide` again, because its additions may need another division. A part that does not define `divide` is computed whole
by every owner. Parts do not know processes: the functions are passed in.
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
    """Returns x unchanged: the communication function of a single owner."""
    return x


@dataclass(frozen=True)
class Vocabulary:
    """Share of a vocabulary of `size` tokens that one tensor-parallel rank ("owner") holds: the rows of tokens first ..
    last-1.

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
        """Returns the logarithm of the sum of exp(logits) over the tokens of all owners, (..., 1), from this owner's
        logits (..., last - first)."""
        top = self.most(logits.detach().amax(-1, keepdim=True))
        return self.leave((logits - top).exp().sum(-1, keepdim=True)).log() + top


@dataclass(frozen=True)
class Owner:
    """Tensor-parallel rank number `number` of `of` ranks ("owners") that divide a model's linear layers, with its
    communication functions. With the default functions, which return their input, it only gives the shapes of a share.

    enter         x -> x; gradients are summed
    leave         results are summed; their gradient passes unchanged
    enter_memory  `enter` for the other sequence, which every owner has whole
    mix           results are summed, and their gradients too: inside a branch, before layers that are divided again
    most          maximum, without a gradient
    gather        (x, axis, size) -> the shards of all owners along the axis; the gradient is sliced to its own
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
        """Returns the number of heads, groups or channels of one owner, of `count` in total. Raises RequestError if the
        number of owners does not divide `count`."""
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
        """Raises RequestError if there are several owners and the value of the field, which cannot be divided, is set;
        `why` completes the message."""
        if value and self.of > 1:
            raise RequestError(
                f"tp={self.of}: {field} {why}; use tp=1", code="conflict", field=field, value=value, expected="tp=1"
            )

    def vocabulary(self, size: int) -> Vocabulary:
        """Returns this owner's share of a vocabulary of `size` tokens, divided as `Shard("vocab")` divides the rows of
        the table."""
        first, last = self.number * size // self.of, (self.number + 1) * size // self.of
        if size < self.of:
            self.share("vocab_size", size)
        return Vocabulary(size, first, last, self.enter, self.leave, self.most, lambda x: self.gather(x, -1, size))


class Spread(Protocol):
    """Interface that divides the tokens of the residual stream (b, s, d) among tensor-parallel ranks ("owners")."""

    def spread(self, x: Tensor) -> Tensor:
        """Returns this owner's tokens (b, s', d), cut from x (b, s, d), which is equal on every owner."""

    def gather(self, x: Tensor) -> Tensor:
        """Returns the tokens of all owners (b, s, d), equal on every owner, from this owner's tokens (b, s', d)."""


def reads_gathered(mixer: nn.Module) -> bool:
    """Returns True if the mixer's own class, not a base class, declares `reads_gathered`: keys and values from its
    state may then belong to tokens of other processes."""
    return bool(vars(type(mixer)).get("reads_gathered", False))


def says_how(part: nn.Module) -> bool:
    """Returns True if the part's own class, not a base class, declares how tensor-parallel ranks divide it, by the
    method `divide`."""
    return "divide" in vars(type(part))


def is_branch(part: nn.Module) -> bool:
    """Returns True if the part is a branch that passes its input through `enter`, as a mixer and an FFN are."""
    return hasattr(part, "enter")


def take_share(inner: nn.Module, owner: Owner) -> None:
    """Calls `take_share(owner)` of a module inside a divided part, if the module has that method, to reduce what its
    declared parameters do not determine, such as its sizes."""
    if callable(take := getattr(inner, "take_share", None)):
        take(owner)


def of_owner(values: Sequence[float], owner: Owner) -> list[float]:
    """Returns this owner's share of a list with one value per head."""
    n = len(values) // owner.of
    return list(values[owner.number * n : (owner.number + 1) * n])
