"""Exchange of token rows between ranks that hold different experts.

An expert-parallel rank ("owner") has the linear layers of some experts, and the tokens of its texts. Each row of a
token goes to the owner of its expert, and its result comes back. Parts do not communicate themselves:
`parallel/experts.py` provides the functions that do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from glassformer.parts.grouped import Groups


class Journey(Protocol):
    """Exchange of the token rows of one pass between expert-parallel ranks ("owners"): it sends this owner's r rows to
    the owners of their experts, and receives r2 rows for the experts of this owner."""

    def there(self, rows: Float[Tensor, "r d"]) -> tuple[Float[Tensor, "r2 d"], Groups]:
        """Sends this owner's rows, in the order of their experts, to the owners of these experts; returns the rows
        received, in the order of this owner's experts, and their groups by expert."""

    def back(self, rows: Float[Tensor, "r2 d"]) -> Float[Tensor, "r d"]:
        """Sends the results of the received rows back to their owners; returns the results of the rows that this owner
        had sent."""


Exchange = Callable[[Int[Tensor, " r"]], Journey]
"""Function of the expert index of each row, (r,), ascending; returns the `Journey` of these rows."""


@runtime_checkable
class Exchanging(Protocol):
    """Interface of a part whose experts may be divided among expert-parallel ranks."""

    exchange: Exchange | None
    n_experts: int

    def keep(self, first: int, last: int, exchange: Exchange) -> None:
        """Removes the weights of all experts but `first` .. `last`-1; from then on the rows of every expert go through
        `exchange`."""
