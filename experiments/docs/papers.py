"""docs/papers.md: every paper that the package cites, with the claims and the modules that cite it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import glassformer
from experiments.docs import DOCS, escaped
from glassformer.laboratory.evidence import known
from glassformer.names.papers import NUMBER, papers

NAME = "papers"
PAGE = DOCS / "papers.md"
SOURCE = Path(glassformer.__file__).parent
BEGIN = """\
<!-- `python -m experiments.docs papers` writes this page from src/glassformer/names/papers.yaml. -->

# Papers

Papers by year, with the claims that put a sentence of theirs to the test (`glassformer claims NAME`) and the modules
that follow them. """


def cited_by() -> dict[str, list[str]]:
    """Returns the modules that name each paper, by its number."""
    found = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        if "evidence" not in path.parts:
            for number in sorted(set(NUMBER.findall(path.read_text(encoding="utf-8")))):
                found[number].append(f"[`{path.stem}`](../src/glassformer/{path.relative_to(SOURCE).as_posix()})")
    return found


def papers_page() -> str:
    """Returns the page."""
    modules = cited_by()
    claims = defaultdict(list)
    for claim in known().values():
        for number in sorted(set(NUMBER.findall(claim.source))):
            claims[number].append(claim.name)
    lines = [f"{BEGIN}There are {len(papers())}.", "", "| paper | claims | modules |", "|---|---|---|"]
    for number, paper in sorted(papers().items()):
        title = f"{escaped(paper.authors)}, [{escaped(paper.title)}]({paper.address})"
        lines.append(f"| {title} | {', '.join(claims[number])} | {', '.join(modules[number])} |")
    return "\n".join(lines) + "\n"
