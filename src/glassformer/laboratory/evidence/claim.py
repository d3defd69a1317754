"""A published sentence and its measurement on a bench."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.figure import Kind, Outcome
from glassformer.names.known import GUIDES
from glassformer.names.papers import cited


@dataclass(frozen=True)
class Claim:
    """A published sentence, such as a guide's, and the measurement that tests it.

    published   the value, in the words of the source
    size        the smallest size at which a verdict is meaningful
    minutes     duration on two cores, roughly
    needs       a text that the user has to give; empty without one
    measure     measures the claim on a bench; the values carry the claim's bounds, which give the verdict
    """

    name: str
    statement: str
    source: str
    published: str
    kind: Kind
    size: str
    minutes: float
    measure: Callable[[Bench], Outcome]
    needs: str = ""

    @property
    def cites(self) -> str:
        """Source of the claim as text, with authors and titles of its papers."""
        return cited(self.source)

    @property
    def quick(self) -> bool:
        return self.kind == "exact"


def credit(guide: str) -> str:
    """Returns the text that credits a guide: its title, and the command that lists its items."""
    return f"{GUIDES[guide]} (glassformer guides {guide})"


def undecidable(reason: str) -> Callable[[Bench], Outcome]:
    """Returns the measuring function of a claim that no experiment of this size can decide: its outcome has no values,
    only the reason."""
    return lambda bench: Outcome(figures=(), size="not measured", sure="not at all", notes=(reason,))
