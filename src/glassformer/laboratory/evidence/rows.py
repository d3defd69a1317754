"""Rows of all claims, each with its stored result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassformer.laboratory.evidence.catalogue import known
from glassformer.laboratory.evidence.claim import Claim
from glassformer.laboratory.evidence.figure import Figure, Verdict
from glassformer.laboratory.evidence.stored import Stored, read


@dataclass(frozen=True)
class ClaimRow:
    """A claim (a published sentence to test) with its stored result; None for a claim without one."""

    claim: Claim
    result: Stored | None

    @property
    def name(self) -> str:
        return self.claim.name

    @property
    def verdict(self) -> Verdict | None:
        """ "holds", "does not hold" or "cannot be shown at this size"; None if it is not measured."""
        return None if self.result is None else self.result.verdict

    @property
    def judged(self) -> Figure | None:
        """First measured value of the claim's result that the claim sets bounds for; None without one."""
        figures = () if self.result is None else self.result.outcome.figures
        return next((one for one in figures if one.judged), None)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict of plain values: the claim, its first measured value that has bounds, its verdict, and its
        whole stored result."""
        claim, held, judged = self.claim, self.result, self.judged
        return {
            "name": claim.name, "statement": claim.statement, "source": claim.cites, "published": claim.published,
            "kind": claim.kind, "size": claim.size, "minutes": claim.minutes, "needs": claim.needs,
            "measured": judged and judged.value, "low": judged and judged.low, "high": judged and judged.high,
            "verdict": self.verdict, "result": held and held.model_dump(mode="json") | {"words": held.words},
        }  # fmt: skip


def overview(*folders: Path) -> list[ClaimRow]:
    """Returns a row for each claim, with its result from the first of the folders that holds one."""
    rows = []
    for claim in known().values():
        stored = (read(place, claim.name) for place in folders)
        held = next((one for one in stored if one is not None and one.answers(claim, tiny=True)), None)
        rows.append(ClaimRow(claim, held))
    return rows
