"""What experts that lie with several owners are told: whose rows go where, and come back.

An owner has the maps of some experts, and the tokens of its own texts. Each row of a token goes to the owner of its
expert, and its result comes back; that is all that is different from experts in one place. Parts know no processes:
the functions are another's (`parallel/experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from glassformer.parts.grouped import Groups


class Journey(Protocol):
    """Of the rows of one pass. r rows are sent from here; r' rows of all owners meet the experts that are here."""

    def there(self, rows: Float[Tensor, "r d"]) -> tuple[Float[Tensor, "r2 d"], Groups]:
        """Rows in the order of their experts -> the rows that are here, in the order of the experts that are here, and
        which of these each meets."""

    def back(self, rows: Float[Tensor, "r2 d"]) -> Float[Tensor, "r d"]:
        """Results, or whatever else there is of the rows that are here -> of the rows that were sent."""


Exchange = Callable[[Int[Tensor, " r"]], Journey]
"""The expert of each row, which ascends -> the journey of these rows."""


@runtime_checkable
class Exchanging(Protocol):
    """A part whose experts may lie with several owners."""

    exchange: Exchange | None
    n_experts: int

    def keep(self, first: int, last: int, exchange: Exchange) -> None:
        """Keeps the maps of the experts `first` .. `last`-1; the rows of all go by `exchange`."""
