"""Measurement and storage of claims, and the list of all with their stored results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text as Line

from glassformer.comparison.verbs import place_of_work
from glassformer.errors import RequestError
from glassformer.figures.terminal import Reported, Tabular, TextTable, dim, ruled, unbroken
from glassformer.files import refuse_foreign
from glassformer.laboratory.evidence.bench import TINY, Bench, Text
from glassformer.laboratory.evidence.catalogue import known, named
from glassformer.laboratory.evidence.claim import Claim
from glassformer.laboratory.evidence.figure import Outcome
from glassformer.laboratory.evidence.rows import ClaimRow, overview
from glassformer.laboratory.evidence.stored import MEASURED, Stored, read, write
from glassformer.laboratory.pages.claim_page import asked_words, figure_words, finding, render_claims, verdict_of
from glassformer.runs.events import Notify, StageEvent
from glassformer.runs.executor import Executor
from glassformer.runs.live import shown
from glassformer.typed import typed

RUNS = "runs"
"""Folder of the models that are trained for claims, next to their results."""
PAGE = "index.html"


@dataclass(frozen=True)
class Claims(Reported, Tabular):
    """Published claims with their verdicts; `print` shows their list, or the values of those that were measured.

    Attributes
    ----------
    rows : tuple of ClaimRow
        The claims; `found["gqa-cache"]` is one by its name.
    measured : bool
        True if these claims were requested, False for the list of all.
    command : str
        Command that repeats the request.
    page : Path or None
        The page of all claims in the folder; None if nothing was written.
    notes : tuple of str
        Remarks on the list.

    Examples
    --------
    >>> found = gf.claims("gqa-cache")
    >>> found["gqa-cache"].verdict
    'holds'
    """

    rows: tuple[ClaimRow, ...]
    measured: bool
    command: str
    page: Path | None = None
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> ClaimRow:
        """Returns a claim by its name."""
        return {row.name: row for row in self.rows}[name]

    def lines(self) -> Iterator[Any]:
        """Yields the printed text: the list of claims, or each measured claim with its values."""
        if not self.measured:
            yield self._list()
            yield finding(self.rows)
        for row in self.rows:
            if self.measured and row.result is not None:
                yield Line(row.claim.statement, style="bold")
                yield f"{row.result.words}; {row.result.outcome.sure}"
                yield dim(f"{row.claim.cites}: {row.claim.published}")
                yield _figures(row.result.outcome)
        yield from map(dim, self.notes)
        if self.page is not None:
            yield unbroken(f"page: {self.page}")

    def _list(self) -> TextTable:
        table = ruled()
        for heading in ("claim", "statement", "class", "minutes", "verdict", "date"):
            table.add_column(heading, justify="right" if heading == "minutes" else "left")
        for row in self.rows:
            claim, date = row.claim, row.result.measured if row.result else ""
            table.add_row(row.name, claim.statement, claim.kind, f"{claim.minutes:g}", verdict_of(row), date)
        return table

    def html(self) -> str:
        return render_claims(self.rows, self.command)

    def to_dict(self) -> list[dict[str, Any]]:
        return [row.to_dict() for row in self.rows]

    def records(self) -> list[dict[str, Any]]:
        """Returns a table row for each claim, without the details of its stored measurement."""
        return [{name: value for name, value in row.items() if name != "result"} for row in self.to_dict()]


@typed
def claims(
    names: Sequence[str] | str = (),
    *,
    all: bool = False,
    quick: bool = False,
    out: str | Path | None = None,
    data: str | Path | None = None,
    seeds: int | None = None,
    again: bool = False,
    released: bool | None = None,
    tiny: bool = False,
    executor: Executor | None = None,
    progress: bool | Notify = True,
    command: str = "gf.claims",
) -> Claims:
    """Tests published claims; without names, lists them with stored results.

    Parameters
    ----------
    names
        Claims to measure, a name or several.
    all
        Measure every claim, except those about a text that is not given.
    quick
        Measure the exact claims only: counts and identities, which take seconds.
    out
        Folder of the results, NAME.json each, with a page of all claims. Its results are kept, and interrupted work
        continues. If None, nothing is kept.
    data
        The text that models are trained on, by default python-docs. Claims about another text need it.
    seeds
        Runs of each arm; by default the number that the claim takes.
    again
        Measure claims that `out` holds too, from its finished runs.
    released
        List the verdicts of this release for claims that `out` does not hold; by default only without `out`.
    tiny
        Take a few steps of two seeds only: the verdict of what is trained is then open.
    executor, progress
        As in `compare`.
    command
        Command that the page names.

    Returns
    -------
    Claims
        The list of all claims, or those that were measured.

    Raises
    ------
    RequestError
        Before anything is measured: for an unknown claim, one whose text is missing, and one that `out` holds from
        another text or with other seeds.

    Examples
    --------
    >>> gf.claims("gqa-cache")["gqa-cache"].verdict
    'holds'
    """
    names = [names] if isinstance(names, str) else list(names)
    if names and (all or quick):
        raise RequestError("give names, or --all, or --quick", code="conflict", field="claims", value=names)
    if not (names or all or quick):
        held = [] if out is None else [Path(out)]
        also = held if released is False or (released is None and out is not None) else [*held, MEASURED]
        said = f"Verdicts that are not in {out} were measured for this release; the last column has their dates."
        return Claims(tuple(overview(*also)), False, command, notes=(said,) if also != held and held else ())
    chosen = named(names)
    for claim in chosen:
        if claim.needs and data is None:
            raise missing(claim)
    if not chosen:
        chosen = [claim for claim in known().values() if data is not None or not claim.needs]
    if quick:
        chosen = [claim for claim in chosen if claim.quick]
    with shown(progress) as notify, place_of_work(out) as place:
        found = _measured(chosen, Path(place), Text(data, notify), tiny, seeds, again, executor, notify)
        told = Claims(tuple(ClaimRow(claim, found[claim.name]) for claim in chosen), True, command)
        if out is None:
            return told
        return replace(told, page=Claims(tuple(overview(Path(out))), False, command).report(Path(out) / PAGE))


def _figures(outcome: Outcome) -> TextTable:
    table = ruled()
    for heading in ("figure", "measured", "published", "required"):
        table.add_column(heading)
    for one in outcome.figures:
        published = "" if one.published is None else f"{one.published:g}"
        table.add_row(one.name, figure_words(one), published, asked_words(one))
    return table


def _measured(
    chosen: Sequence[Claim], folder: Path, text: Text, tiny: bool, seeds: int | None, again: bool,
    executor: Executor | None, notify: Notify,
) -> dict[str, Stored]:  # fmt: skip
    found: dict[str, Stored] = {}
    kept = {claim.name: read(folder, claim.name) for claim in chosen}
    refuse_foreign(folder, PAGE)
    kept = {} if again else kept
    for one in kept.values():
        if one is not None:
            one.check_asked(folder, None if text.given is None else text.name, seeds)
    for claim in chosen:
        held = kept.get(claim.name)
        if held is None or not held.answers(claim, tiny):
            notify(StageEvent(words=f"{claim.name}: about {claim.minutes:g} min"))
            place = folder / RUNS / (f"{claim.name}{TINY}" if tiny else claim.name)
            bench = Bench(place, text, tiny, seeds, executor, notify)
            began = time.perf_counter()
            outcome = claim.measure(bench)
            held = Stored.of(claim, outcome, time.perf_counter() - began, tiny, text.name, seeds)
            write(held, folder)
        found[claim.name] = held
        notify(StageEvent(words=f"{claim.name}: {held.words}"))
    return found


def missing(claim: Claim) -> RequestError:
    return RequestError(
        f"{claim.name} is about {claim.needs}, which is not here; give the file as --data FILE",
        code="missing", field="data", value=None, expected=claim.needs,
    )  # fmt: skip
