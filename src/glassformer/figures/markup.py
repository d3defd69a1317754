"""HTML and SVG as text, escaped by type: a plain `str` is escaped, a `Markup` is not."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff]")
_VOID = frozenset(["br", "hr", "img", "input", "link", "meta"])


class Markup(str):
    """Text that a page can contain without escaping."""

    __slots__ = ()


def clean(value: object) -> str:
    """Returns a value as text in which U+FFFD replaces characters that no page can contain (controls, surrogates)."""
    return _UNPRINTABLE.sub("\ufffd", value if isinstance(value, str) else str(value))


def escape(value: object) -> Markup:
    """Returns a value as text escaped for a page; markup is returned unchanged, and None gives an empty text."""
    if isinstance(value, Markup):
        return value
    return Markup("") if value is None else Markup(html.escape(clean(value), quote=True))


def join(pieces: Iterable[object], between: str = "") -> Markup:
    """Returns the pieces as one markup, with `between` between them; each that is not markup is escaped."""
    return Markup(escape(between).join(escape(piece) for piece in pieces))


def breakable(words: str, after: str) -> Markup:
    """Returns escaped text in which a line may break before each of the characters in `after`."""
    pieces: list[object] = []
    for sign in words:
        if pieces and sign in after:
            pieces.append(Markup("<wbr>"))
        pieces.append(sign)
    return join(pieces)


def number(value: float) -> str:
    """Returns a coordinate in pixels as text with up to two decimals, which is finer than any screen and than the
    values that hovering shows."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def tag(name: str, /, *children: object, **attributes: Any) -> Markup:
    """Returns an HTML or SVG element, as in `tag("a", "words", class_="y")`. In the name of an attribute a last
    underscore is dropped and others become hyphens; an attribute of None or False is left out."""
    opening = "".join([f"<{name}", *(_attribute(key, value) for key, value in attributes.items()), ">"])
    return Markup(opening) if name in _VOID else Markup(f"{opening}{join(children)}</{name}>")


def _attribute(key: str, value: Any) -> str:
    """Returns an attribute as text with a leading space: only its name for True, "" for None and False."""
    if value is None or value is False:
        return ""
    key = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {key}"
    return f' {key}="{escape(number(value) if isinstance(value, float) else str(value))}"'


def path(points: Iterable[tuple[float, float]]) -> str:
    """Returns the attribute `d` of a <path> of straight lines through points (x, y) in pixels."""
    return "".join(f"{'L' if i else 'M'}{number(x)},{number(y)}" for i, (x, y) in enumerate(points))


def plain_table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str | int]]) -> Markup:
    """Returns an HTML table that needs no stylesheet, for a notebook: cells are text, or integers aligned to the right;
    the first cell of each row is its heading."""
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
