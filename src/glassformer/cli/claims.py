"""Published claims in the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from glassformer.cli.show import ComparisonView, output, ruled
from glassformer.errors import RequestError
from glassformer.laboratory.claims import claims, overview
from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.stored import MEASURED, Stored
from glassformer.report.claims import asked_words, figure_words, finding, verdict_of, write_claims

FOLDER, PAGE = "claims", "index.html"


def show_claims(
    names: Sequence[str],
    every: bool,
    quick: bool,
    out: str | None,
    data: str | None,
    seeds: int | None,
    again: bool,
    command: str,
    as_json: bool,
) -> None:
    """Lists the claims, or measures those that are named."""
    if names and (every or quick):
        raise RequestError("give names, or --all, or --quick", code="conflict", field="claims", value=list(names))
    folder = Path(FOLDER if out is None else out)
    if not (names or every or quick):
        rows = overview(folder, MEASURED if out is None else None)
        if as_json:
            print(json.dumps(rows, allow_nan=False))
            return
        output().print(listing(rows))
        output().print(finding(rows), highlight=False)
        if out is None:
            said = f"Verdicts that are not in {folder} were measured for this release; the last column has their dates."
            output().print(said, style="dim", highlight=False)
        return

    with ComparisonView(quiet=as_json) as view:

        def tell(claim: Claim, found: Stored | None) -> None:
            view.say(f"{claim.name}: {f'about {claim.minutes:g} min' if found is None else found.words}")

        found = claims(names, folder, quick=quick, data=data, seeds=seeds, again=again, on_event=view.event,
                       on_progress=view.progress, on_claim=tell)  # fmt: skip
    rows = overview(folder)
    write_claims(rows, command, folder / PAGE)
    if as_json:
        print(json.dumps([row for row in rows if row["name"] in found], allow_nan=False))
        return
    console = output()
    for row in rows:
        if row["name"] in found:
            console.print(row["statement"], style="bold", highlight=False)
            console.print(f"{row['result']['words']}; {row['result']['outcome']['sure']}", highlight=False)
            console.print(figures(row["result"]["outcome"]))
    console.print(f"page: {folder / PAGE}", style="dim", highlight=False)


def listing(rows: Sequence[dict[str, Any]]) -> Table:
    table = ruled()
    for heading in ("claim", "what it says", "class", "minutes", "verdict", "date"):
        table.add_column(heading, justify="right" if heading == "minutes" else "left")
    for row in rows:
        date = row["result"]["measured"] if row["result"] else ""
        table.add_row(row["name"], row["statement"], row["kind"], f"{row['minutes']:g}", verdict_of(row), date)
    return table


def figures(outcome: dict[str, Any]) -> Table:
    table = ruled()
    for heading in ("figure", "here", "published", "the claim asks"):
        table.add_column(heading)
    for one in outcome["figures"]:
        published = "" if one["published"] is None else f"{one['published']:g}"
        table.add_row(one["name"], figure_words(one), published, asked_words(one))
    return table
