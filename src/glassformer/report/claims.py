"""The page of claims: what was published against what was measured here."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..figures import Markup, against_row, copyable, document, embedded, tag, write_document
from .html import caption, cell, scroll, section

UNMEASURED = "not measured yet"
ORDER = {"exact": "Exact", "measured": "Measured", "scoped": "Measured, at one size",
         "undecidable": "Out of reach"}  # fmt: skip
"""Headings by class, in their order on the page."""
SUMMARY = "Summary"
VERDICTS = ("holds", "does not hold", "cannot be shown at this size", UNMEASURED)


def write_claims(rows: Sequence[dict[str, Any]], command: str, path: str | os.PathLike[str]) -> Path:
    """Writes the page of `laboratory.claims.overview`."""
    return write_document(render_claims(rows, command), path)


def verdict_of(row: dict[str, Any]) -> str:
    return row["result"]["verdict"] if row["result"] else UNMEASURED


def finding(rows: Sequence[dict[str, Any]]) -> str:
    """How many claims have which verdict."""
    counted = Counter(map(verdict_of, rows))
    told = ", ".join(f"{words}: {many}" for words, many in counted.most_common())
    return f"{len(rows)} claims; {told}."


def number(value: float) -> str:
    """In four figures; a count whole."""
    if value == round(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def figure_words(one: dict[str, Any]) -> str:
    """A figure in words: value, unit, interval where there is one."""
    told = f"{number(one['value'])} {one['unit']}".strip()
    if one["low"] is None or one["low"] == one["high"]:
        return told
    return f"{told} ({number(one['low'])} to {number(one['high'])})"


def asked_words(one: dict[str, Any]) -> str:
    """What the claim asks of a figure."""
    least, most = one["least"], one["most"]
    if least is not None and most is not None:
        low, high = number(least), number(most)
        return low if low == high else f"{low} to {high}"
    if least is not None:
        return f"at least {number(least)}"
    return "" if most is None else f"at most {number(most)}"


def render_claims(rows: Sequence[dict[str, Any]], command: str) -> str:
    """The page as text."""
    groups = {kind: [row for row in rows if row["kind"] == kind] for kind in ORDER}
    there = {kind: own for kind, own in groups.items() if own}
    parts = [section(kind, ORDER[kind], *map(_claim, own)) for kind, own in there.items()]
    header = tag(
        "header", tag("p", "Glassformer claims", class_="kicker"), tag("h1", "What is said, and what is found here"),
        tag("p", finding(rows), class_="finding"), copyable(command),
        caption("A band is where the claim puts a figure, a diamond what its source has, a dot with its bar what was "
                "measured here. A verdict follows from the figures: it holds where the whole bar lies in the band, "
                "does not hold where all of it lies outside, and is open in between."),
    )  # fmt: skip
    parts.insert(0, section("summary", SUMMARY, _counts(rows), _lines(rows)))
    links = [tag("li", tag("a", SUMMARY, href="#summary"))]
    links += [tag("li", tag("a", ORDER[kind], href=f"#{kind}")) for kind in there]
    body = tag(
        "div", header, tag("nav", tag("ul", *links), aria_label="Contents"),
        tag("main", *parts, id="content", tabindex="-1"), class_="page",
    )  # fmt: skip
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    skip = tag("a", "Skip to the claims", href="#content", class_="gf-skip")
    return document("Claims", skip, body, embedded(list(rows), "claims"), style=style)


def counts(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    """How many claims of each class have which of the verdicts VERDICTS, and all together."""
    of_class = {kind: Counter(verdict_of(row) for row in rows if row["kind"] == kind) for kind in ORDER}
    told = [(ORDER[kind], found) for kind, found in of_class.items() if found]
    told.append(("All", sum((found for _, found in told), Counter())))
    return [(name, [found[words] for words in VERDICTS]) for name, found in told]


def _counts(rows: Sequence[dict[str, Any]]) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", word, scope="col") for word in ("class", *VERDICTS))))
    body = [tag("tr", tag("th", name, scope="row"), *map(cell, map(str, many))) for name, many in counts(rows)]
    return scroll("Verdicts by class", tag("table", head, tag("tbody", *body)))


def _lines(rows: Sequence[dict[str, Any]]) -> Markup:
    """A line for each claim, which leads to it."""
    head = tag("thead", tag("tr", *(tag("th", word, scope="col") for word in ("claim", "it says", "verdict"))))
    body = [
        tag("tr", tag("th", tag("a", row["name"], href=f"#{row['name']}"), scope="row"), cell(row["statement"]),
            cell(verdict_of(row)))
        for kind in ORDER for row in rows if row["kind"] == kind
    ]  # fmt: skip
    return scroll("Verdicts by claim", tag("table", head, tag("tbody", *body)))


def _claim(row: dict[str, Any]) -> Markup:
    found = row["result"]
    told = [tag("h3", row["statement"], id=row["name"]), tag("p", *_verdict(row))]
    if found is None:
        asks = f", about {row['minutes']:g} minutes" + (f", and {row['needs']}" if row["needs"] else "")
        told.append(caption(f"{row['source']}: {row['published']}. It takes {row['size']}{asks}."))
        return tag("article", *told)
    outcome = found["outcome"]
    if outcome["figures"]:
        heads = ("figure", "drawn", "here", "published", "the claim asks")
        head = tag("thead", tag("tr", *(tag("th", word, scope="col") for word in heads)))
        body = tag("tbody", *map(_figure, outcome["figures"]))
        told.append(scroll(f"Figures of {row['name']}", tag("table", head, body)))
    where = f"{found['machine'].get('processor', '')}, {found['measured']}"
    notes = " ".join(outcome["notes"])
    shown = f"Shown at: {outcome['size']}; {outcome['sure']}; {where}."
    told.append(caption(f"{row['source']}: {row['published']}. {shown} {notes}"))
    return tag("article", *told)


def _verdict(row: dict[str, Any]) -> list[object]:
    return [tag("strong", row["result"]["words"] if row["result"] else UNMEASURED), f" · {row['name']}"]


def _figure(one: dict[str, Any]) -> Markup:
    drawn = against_row(one["value"], one["low"], one["high"], one["published"], one["least"], one["most"],
                        f"{one['name']}: {figure_words(one)}")  # fmt: skip
    published = "" if one["published"] is None else number(one["published"])
    return tag("tr", tag("th", one["name"], scope="row"), cell(drawn), cell(figure_words(one)), cell(published),
               cell(asked_words(one)))  # fmt: skip
