"""Exchange of token rows between ranks that hold different experts.

An expert-parallel rank ("owner") has the linear layers of some experts, and the tokens of its texts. Each row of a
token goes to the owner of its expert, and its result comes back. Parts do not know processes: `parallel/experts.py`
provides the functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from glassformer.parts.grouped import Groups


class Journey(Protocol):
    """Exchange of the rows of one pass: r rows are sent from this owner; r' rows of all owners use its experts."""

    def there(self, rows: Float[Tensor, "r d"]) -> tuple[Float[Tensor, "r2 d"], Groups]:
        """Sends the rows, in the order of their experts; returns the received rows, in the order of this owner's
        experts, and their groups by expert."""

    def back(self, rows: Float[Tensor, "r2 d"]) -> Float[Tensor, "r d"]:
        """Sends results of the received rows back; returns those of the rows that this owner had sent."""


Exchange = Callable[[Int[Tensor, " r"]], Journey]
"""Function of the expert of each row (r,), ascending; returns the exchange of these rows."""


@runtime_checkable
class Exchanging(Protocol):
    """Interface of a part whose experts may be divided among owners."""

    exchange: Exchange | None
    n_experts: int

    def keep(self, first: int, last: int, exchange: Exchange) -> None:
        """Keeps only the weights of the experts `first` .. `last`-1; the rows of all go through `exchange`."""
