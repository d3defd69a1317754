"""python -m experiments.claims: docs/claims.md and docs/claims/index.html, from the results that are stored."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from glassformer.figures import write_document
from glassformer.laboratory.evidence import ClaimRow, overview
from glassformer.laboratory.evidence.figure import KINDS
from glassformer.laboratory.evidence.stored import MEASURED
from glassformer.laboratory.pages.claim_page import (
    ORDER,
    VERDICTS,
    asked_words,
    counts,
    figure_words,
    finding,
    render_claims,
    verdict_of,
)

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = "make laboratory"
BEGIN = """\
# Claims

Statements of papers and guides about transformers, tested by `glassformer claims`. Each claim is one entry of a list in
`src/glassformer/laboratory/evidence`: the statement, its source, the measurement, and the bounds that the statement
puts on the figures. The verdict is computed: a claim *holds* if the whole interval of every judged figure is within
its bounds, *does not hold* if one interval is outside, and is open in between. Trained models have one size, given with
the result; a claim without measurement has no verdict.
"""


def page(rows: Sequence[ClaimRow]) -> str:
    """Returns the page: a table for each class of claims."""
    told = [BEGIN, finding(rows), "", *_summary(rows)]
    for kind, title in ORDER.items():
        own = [row for row in rows if row.claim.kind == kind]
        if own:
            told += [f"## {title}", "", f"{KINDS[kind][:1].upper()}{KINDS[kind][1:]}.", ""]  # type: ignore[index]
            told += ["| claim | source | here | asked | verdict |", "|---|---|---|---|---|", *map(_row, own), ""]
    return "\n".join(told)


def _summary(rows: Sequence[ClaimRow]) -> list[str]:
    """Returns the lines of two tables: counts of verdicts by class, and the verdict of each claim."""
    told = ["| class | " + " | ".join(VERDICTS) + " |", "|---|" + "---|" * len(VERDICTS)]
    told += [f"| {name} | " + " | ".join(map(str, many)) + " |" for name, many in counts(rows)]
    told += ["", "| claim | verdict | claim | verdict |", "|---|---|---|---|"]
    lines = [f"| {row.name} | {verdict_of(row)} " for kind in ORDER for row in rows if row.claim.kind == kind]
    half = -(-len(lines) // 2)
    return [*told, *(a + b + "|" for a, b in zip_longest(lines[:half], lines[half:], fillvalue="| | ")), ""]


def _row(row: ClaimRow) -> str:
    name = f"**{row.name}** {row.claim.statement}"
    found = row.result
    if found is None:
        needs = f", with {row.claim.needs}" if row.claim.needs else ""
        cells = [name, row.claim.cites, "", "", f"{verdict_of(row)} ({row.claim.minutes:g} min{needs})"]
    else:
        judged = [one for one in found.outcome.figures if one.judged]
        here = "; ".join(f"{one.name}: {figure_words(one)}" for one in judged) or " ".join(found.outcome.notes)
        shown = "" if row.claim.kind == "exact" else f" ({found.outcome.size}; {found.outcome.sure})"
        result = f"[{found.verdict}](../src/glassformer/laboratory/measured/{row.name}.json){shown}"
        cells = [name, row.claim.cites, here, "; ".join(map(asked_words, judged)), result]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    rows = overview(MEASURED)
    (DOCS / "claims.md").write_text(page(rows), encoding="utf-8")
    write_document(render_claims(rows, COMMAND), DOCS / "claims" / "index.html")


if __name__ == "__main__":
    main()
