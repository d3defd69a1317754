"""docs/dynamics.md and its pictures: claims about training dynamics, drawn from their stored measurements."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.docs import DOCS, escaped
from experiments.docs.guides import table
from experiments.svg import panels
from glassformer.laboratory.evidence import ClaimRow, overview
from glassformer.laboratory.evidence.claim import Claim
from glassformer.laboratory.evidence.condensing import CLAIMS as CONDENSING
from glassformer.laboratory.evidence.depth import CLAIMS as DEPTH
from glassformer.laboratory.evidence.entropy import CLAIMS as ENTROPY
from glassformer.laboratory.evidence.figure import Figure
from glassformer.laboratory.evidence.found import CLAIMS as FOUND
from glassformer.laboratory.evidence.stored import MEASURED
from glassformer.laboratory.evidence.warmup import CLAIMS as WARMUP
from glassformer.laboratory.pages.claim_page import asked_words, figure_words, number, verdict_of
from glassformer.laboratory.pages.pictures import chart

NAME = "dynamics"
PAGE, FOLDER = DOCS / "dynamics.md", DOCS / "figures" / "dynamics"
WIDTH, HEIGHT = 620, 360
SUBJECTS: dict[str, list[Claim]] = {
    "Depth at the start of training": DEPTH,
    "Condensation from a small initialization": CONDENSING,
    "Entropy and logits of attention": ENTROPY,
    "Three explanations of warm-up": WARMUP,
    "Sinks, spikes, and activations by width": FOUND,
}
"""Headings of the page -> claims in order."""
BEGIN = """\
<!-- `python -m experiments.docs dynamics` writes this page and its pictures from the stored measurements. -->

# Training dynamics, measured

Claims of papers about tokens, gradients, attention and weights in the course of training. `glassformer claims NAME`
repeats a measurement in minutes and draws it; a verdict is computed from the figures, as on [the page of all
claims](claims.md). [Under glass](under_glass.md) explains the statistics and has each of them at work in one run. Thick
lines are means over seeds, thin ones single seeds.
"""


def rows() -> dict[str, ClaimRow]:
    """Returns the claims of the page by name, with their stored results."""
    names = {claim.name for claims in SUBJECTS.values() for claim in claims}
    return {row.name: row for row in overview(MEASURED) if row.name in names}


def dynamics_page() -> str:
    """Returns the page: a table of verdicts, then figures and pictures by claim."""
    of, pieces = rows(), [BEGIN]
    verdicts = ([f"[{row.name}](#{row.name})", escaped(row.claim.statement), verdict_of(row)] for row in of.values())
    pieces.append(table(("claim", "statement", "verdict"), verdicts))
    for heading, claims in SUBJECTS.items():
        pieces.append(f"## {heading}")
        for claim in claims:
            pieces += _claim(of[claim.name])
    return "\n\n".join(pieces) + "\n"


def _claim(row: ClaimRow) -> Iterator[str]:
    yield f"### {row.name}"
    yield f"{escaped(row.claim.statement)} ({escaped(row.claim.cites)}: {escaped(row.claim.published)}.)"
    if row.result is None:
        yield f"`glassformer claims {row.name}`: {verdict_of(row)}."
        return
    found = row.result.outcome
    yield f"**{verdict_of(row)}**, with {escaped(found.size)}; {escaped(found.sure)}: `glassformer claims {row.name}`"
    yield table(("figure", "here", "published", "the claim asks"), map(_figure, found.figures))
    if found.pictures:
        yield f"![{escaped(picture_words(row))}](figures/dynamics/{row.name}.svg)"
    yield from (escaped(" ".join(notes)) for notes in (found.notes,) if notes)


def _figure(one: Figure) -> list[str]:
    published = "" if one.published is None else number(one.published)
    return [escaped(one.name), escaped(figure_words(one)), published, asked_words(one)]


def picture_words(row: ClaimRow) -> str:
    """Returns what the picture of a claim shows, for readers who do not see it."""
    assert row.result is not None
    titles = [f"{one.title}, by {one.x}" for one in row.result.outcome.pictures]
    return f"{row.name}: {'; '.join(titles)}"


def drawings() -> dict[str, str]:
    """Returns the pictures by claim, each the text of an SVG file."""
    return {
        name: panels([chart(one, WIDTH, HEIGHT) for one in row.result.outcome.pictures], picture_words(row), WIDTH,
                     HEIGHT)
        for name, row in rows().items()
        if row.result is not None and row.result.outcome.pictures
    }  # fmt: skip


def write() -> None:
    """Writes the page and its pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(dynamics_page(), encoding="utf-8")
    for name, drawn in drawings().items():
        (FOLDER / f"{name}.svg").write_text(drawn, encoding="utf-8")
