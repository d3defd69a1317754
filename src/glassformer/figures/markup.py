"""HTML and SVG as text, escaped unless it says otherwise: a plain `str` is words, a `Markup` is markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff]")
_VOID = frozenset(["br", "hr", "img", "input", "link", "meta"])


class Markup(str):
    """Text that may stand in a page as it is."""

    __slots__ = ()


def clean(value: object) -> str:
    """The words of a value, without what no page can hold (controls, halves of surrogate pairs)."""
    return _UNPRINTABLE.sub("\ufffd", value if isinstance(value, str) else str(value))


def escape(value: object) -> Markup:
    """Words made safe for a page; markup passes unchanged, None is nothing."""
    if isinstance(value, Markup):
        return value
    return Markup("") if value is None else Markup(html.escape(clean(value), quote=True))


def join(pieces: Iterable[object], between: str = "") -> Markup:
    """Pieces one after another, each escaped if it is words."""
    return Markup(escape(between).join(escape(piece) for piece in pieces))


def breakable(words: str, after: str) -> Markup:
    """Words that may be broken over lines after these signs."""
    pieces: list[object] = []
    for sign in words:
        if pieces and sign in after:
            pieces.append(Markup("<wbr>"))
        pieces.append(sign)
    return join(pieces)


def number(value: float) -> str:
    """A coordinate: two decimals are finer than any screen, and keep a read-out exact to a thousandth."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def tag(name: str, /, *children: object, **attributes: Any) -> Markup:
    """`tag("a", "words", class_="y")`: underscores become hyphens, None and False leave an attribute out."""
    opening = "".join([f"<{name}", *(_attribute(key, value) for key, value in attributes.items()), ">"])
    return Markup(opening) if name in _VOID else Markup(f"{opening}{join(children)}</{name}>")


def _attribute(key: str, value: Any) -> str:
    """One attribute with its leading space, or nothing."""
    if value is None or value is False:
        return ""
    key = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {key}"
    return f' {key}="{escape(number(value) if isinstance(value, float) else str(value))}"'


def path(points: Iterable[tuple[float, float]]) -> str:
    """The `d` of a line through points in pixels."""
    return "".join(f"{'L' if i else 'M'}{number(x)},{number(y)}" for i, (x, y) in enumerate(points))


def plain_table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str | int]]) -> Markup:
    """A table without a stylesheet, as a notebook shows it: rows of words and whole numbers, which are aligned right;
    the first cell of each names it."""
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
