"""Page of claims: published values against measured ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from glassformer.figures import Markup, against_row, copyable, tag
from glassformer.laboratory.evidence.figure import Figure
from glassformer.laboratory.evidence.rows import ClaimRow
from glassformer.laboratory.pages.pictures import chart
from glassformer.report.html import caption, cell, framed, scroll, section

UNMEASURED = "not measured yet"
ORDER = {"exact": "Exact", "measured": "Measured", "scoped": "Measured, at one size",
         "undecidable": "Out of reach"}  # fmt: skip
"""Class of claims -> heading, in the order of the page."""
SUMMARY = "Summary"
VERDICTS = ("holds", "does not hold", "cannot be shown at this size", UNMEASURED)


def verdict_of(row: ClaimRow) -> str:
    return row.verdict or UNMEASURED


def finding(rows: Sequence[ClaimRow]) -> str:
    """Returns a sentence with the number of claims by verdict."""
    counted = Counter(map(verdict_of, rows))
    told = ", ".join(f"{words}: {many}" for words, many in counted.most_common())
    return f"{len(rows)} claims; {told}."


def number(value: float) -> str:
    """Formats a number of the page to four digits; a count as an integer."""
    if value == round(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def figure_words(one: Figure) -> str:
    """Formats a measured value with its unit, and its interval if known."""
    told = f"{number(one.value)} {one.unit}".strip()
    if one.low is None or one.high is None or one.low == one.high:
        return told
    return f"{told} ({number(one.low)} to {number(one.high)})"


def asked_words(one: Figure) -> str:
    """Returns the bounds that the claim sets for a measured value as text: `at least 0.5`, `1 to 2`; empty without
    bounds."""
    least, most = one.least, one.most
    if least is not None and most is not None:
        low, high = number(least), number(most)
        return low if low == high else f"{low} to {high}"
    if least is not None:
        return f"at least {number(least)}"
    return "" if most is None else f"at most {number(most)}"


def render_claims(rows: Sequence[ClaimRow], command: str) -> str:
    """Returns the page of claims as HTML text, with the command that made it."""
    groups = {kind: [row for row in rows if row.claim.kind == kind] for kind in ORDER}
    there = {kind: own for kind, own in groups.items() if own}
    contents = {
        "summary": (SUMMARY, section("summary", SUMMARY, _counts(rows), _lines(rows))),
        **{kind: (ORDER[kind], section(kind, ORDER[kind], *map(_claim, own))) for kind, own in there.items()},
    }
    header = tag(
        "header", tag("p", "Glassformer claims", class_="kicker"), tag("h1", "Published claims, tested"),
        tag("p", finding(rows), class_="finding"), copyable(command),
        caption("A band is where the claim puts a figure, a diamond what its source has, a dot with its bar what was "
                "measured here. A verdict follows from the figures: it holds if the whole bar is in the band, "
                "does not hold if all of it is outside, and is open in between."),
    )  # fmt: skip
    return framed("Claims", header, contents, [row.to_dict() for row in rows], "claims", "claims")


def counts(rows: Sequence[ClaimRow]) -> list[tuple[str, list[int]]]:
    """Returns, for each class of claims ("Exact", "Measured", ...), its numbers of claims by verdict, in the order of
    VERDICTS, and their sum."""
    of_class = {kind: Counter(verdict_of(row) for row in rows if row.claim.kind == kind) for kind in ORDER}
    told = [(ORDER[kind], found) for kind, found in of_class.items() if found]
    told.append(("All", sum((found for _, found in told), Counter())))
    return [(name, [found[words] for words in VERDICTS]) for name, found in told]


def _counts(rows: Sequence[ClaimRow]) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", word, scope="col") for word in ("class", *VERDICTS))))
    body = [tag("tr", tag("th", name, scope="row"), *map(cell, map(str, many))) for name, many in counts(rows)]
    return scroll("Verdicts by class", tag("table", head, tag("tbody", *body)))


def _lines(rows: Sequence[ClaimRow]) -> Markup:
    """Returns the page's list of claims: a line for each, with a link to its section."""
    head = tag("thead", tag("tr", *(tag("th", word, scope="col") for word in ("claim", "statement", "verdict"))))
    body = [
        tag("tr", tag("th", tag("a", row.name, href=f"#{row.name}"), scope="row"), cell(row.claim.statement),
            cell(verdict_of(row)))
        for kind in ORDER for row in rows if row.claim.kind == kind
    ]  # fmt: skip
    return scroll("Verdicts by claim", tag("table", head, tag("tbody", *body)))


def _claim(row: ClaimRow) -> Markup:
    found = row.result
    told = [tag("h3", row.claim.statement, id=row.name), tag("p", *_verdict(row))]
    if found is None:
        asks = f", about {row.claim.minutes:g} minutes" + (f", and {row.claim.needs}" if row.claim.needs else "")
        told.append(caption(f"{row.claim.cites}: {row.claim.published}. It takes {row.claim.size}{asks}."))
        return tag("article", *told)
    outcome = found.outcome
    if outcome.figures:
        heads = ("figure", "plot", "measured", "published", "required")
        head = tag("thead", tag("tr", *(tag("th", word, scope="col") for word in heads)))
        body = tag("tbody", *map(_figure, outcome.figures))
        told.append(scroll(f"Figures of {row.name}", tag("table", head, body)))
    if outcome.pictures:
        told.append(tag("div", *(tag("div", chart(picture)) for picture in outcome.pictures), class_="maps"))
    where = f"{found.machine.get('processor', '')}, {found.measured}"
    notes = " ".join(outcome.notes)
    shown = f"Shown at: {outcome.size}; {outcome.sure}; {where}."
    told.append(caption(f"{row.claim.cites}: {row.claim.published}. {shown} {notes}"))
    return tag("article", *told)


def _verdict(row: ClaimRow) -> list[object]:
    return [tag("strong", row.result.words if row.result else UNMEASURED), f" · {row.name}"]


def _figure(one: Figure) -> Markup:
    drawn = against_row(one.value, one.low, one.high, one.published, one.least, one.most,
                        f"{one.name}: {figure_words(one)}")  # fmt: skip
    published = "" if one.published is None else number(one.published)
    return tag("tr", tag("th", one.name, scope="row"), cell(drawn), cell(figure_words(one)), cell(published),
               cell(asked_words(one)))  # fmt: skip
