"""A table that needs no stylesheet: what an object shows of itself in a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from .markup import Markup, join, tag


def plain_table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str | int]]) -> Markup:
    """Rows of words and of whole numbers, which stand to the right; the first cell of each names it."""
    left, right = "text-align:left", "text-align:right"
    numbers = [any(isinstance(row[i], int) for row in rows) for i in range(len(headings))]

    def cells(name: str, row: Sequence[str | int]) -> list[Markup]:
        words = (f"{cell:,}" if isinstance(cell, int) else cell for cell in row)
        styles = (right if number else left for number in numbers)
        return [
            tag(name if i else "th", word, style=style)
            for i, (word, style) in enumerate(zip(words, styles, strict=True))
        ]

    head = tag("tr", *cells("th", headings))
    body = join(tag("tr", *cells("td", row)) for row in rows)
    return tag("table", tag("caption", caption, style=left), tag("thead", head), tag("tbody", body))
