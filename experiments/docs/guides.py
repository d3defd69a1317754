"""docs/guides.md: the items of the guides with the command that shows each, and corrections of their figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from experiments.docs import DOCS, chapters, escaped
from glassformer.laboratory.guide_table import HOW, VERDICTS, Correction, GuideRow, Guides, guide_tables
from glassformer.names.known import GUIDES

NAME = "guides"
PAGE = DOCS / "guides.md"
BEGIN = """\
<!-- `python -m experiments.docs guides` writes this page from src/glassformer/laboratory/guide_tables. -->

# The guides, item by item

Five guides explain the transformer and ask for a system that shows it. This table lists each item of them with the
command that shows it; `glassformer guides` prints it, and a test runs every command that ends within seconds.
"""

START = (
    (
        "beginner",
        "[a first transformer](../examples/first_transformer.ipynb), a notebook; "
        '`glassformer inspect smollm2 "The cat sat on the mat"`',
        "`glassformer guides first-lesson`; [parts](mixers.md)",
    ),
    (
        "practitioner",
        "`glassformer advise --goal chat`; `glassformer plan llama-3-8b --machine h100`",
        "`glassformer convert`, `glassformer check`; [planning](planning.md)",
    ),
    (
        "researcher",
        "`glassformer compare gpt2@1m llama@1m --data python-docs --minutes 1`; `glassformer ablate`",
        "[honest comparison](honest-comparison.md); [claims](claims.md); [own parts](own-parts.md)",
    ),
)
"""First and next steps by reader."""


def guides_page() -> str:
    """Returns the page: counts, a table for each guide, and the corrections."""
    tables = guide_tables()
    pages = ", ".join(f"[{GUIDES[name]}](guides/{name}.md)" for name in tables)
    pieces = [
        f"{BEGIN}Chapter by chapter, with formulas, code and output: {pages}.\n\n{HOW}",
        table(("guide", *VERDICTS), _counts()),
    ]
    pieces += ["## Where to start", table(("reader", "first", "then"), START)]
    for name, one in tables.items():
        pieces += [f"## {GUIDES[name]}", f"`glassformer guides {name}`"]
        pieces.append(table(("item", "content", "command", "verdict"), map(_row, one.rows)))
    corrections = Guides(tuple(row for one in tables.values() for row in one.rows)).corrections
    pieces += ["## Corrections", "Figures and statements of the guides that are wrong, with what replaces them."]
    pieces.append(table(("item", "the guide", "here", "source"), (_correction(*one) for one in corrections.items())))
    return "\n\n".join(pieces) + "\n"


def write() -> None:
    """Writes the page and those along the guides."""
    PAGE.write_text(guides_page(), encoding="utf-8")
    chapters.write()


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _counts() -> Iterator[Sequence[str]]:
    for name, one in guide_tables().items():
        counts = Guides(one.rows).counts
        yield GUIDES[name], *(str(counts.get(verdict, 0)) for verdict in VERDICTS)


def _row(row: GuideRow) -> Sequence[str]:
    command = f"`{row.command}`".replace("|", "\\|") if row.command else ""
    verdict = row.verdict if row.reason is None else f"{row.verdict}: {escaped(row.reason)}"
    return row.item, escaped(row.source), command, verdict


def _correction(item: str, one: Correction) -> Sequence[str]:
    return item, escaped(one.guide), escaped(one.ours), escaped(one.source)
