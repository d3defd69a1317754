"""Results as text: tables for a terminal, and base classes of results that print as on the command line."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

from .document import write_document
from .markup import Markup, plain_table, tag

WIDTH = 120
"""Width in characters of text that is not written to a terminal."""
_BYTES = ("B", "kB", "MB", "GB", "TB")
_BARS = "▁▂▃▄▅▆▇█"


class TextTable(Table):
    """Table with literal cells and headings: brackets in a name are not read as rich's markup."""

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        """Adds a row of cells; a string is shown literally, and a rich `Text` keeps its style."""
        literal = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        super().add_row(*literal, style=style, end_section=end_section)

    def add_column(self, header: RenderableType = "", *rest: Any, **options: Any) -> None:
        """Adds a column with a literal heading."""
        super().add_column(Text(header) if isinstance(header, str) else header, *rest, **options)


def ruled(title: str | None = None) -> TextTable:
    """Returns an empty table with a line below its headings and none between its columns."""
    return TextTable(title=_literal(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def unruled(title: str | None = None) -> TextTable:
    """Returns an empty table without lines, its headings bold."""
    return TextTable(
        title=_literal(title), title_justify="left", box=None, header_style="bold", padding=(0, 2, 0, 0)
    )  # fmt: skip


def bare() -> TextTable:
    """Returns an empty table without lines and headings."""
    return TextTable(box=None, show_header=False, pad_edge=False, padding=(0, 2))


def _literal(text: str | None) -> Text | None:
    return Text(text, style="bold") if text else None


def size(value: float | None) -> str:
    """Formats a number of bytes with three figures and the unit B, kB, MB, GB or TB; None gives a dash."""
    if value is None:
        return "–"
    for unit in _BYTES:
        if abs(value) < 1000 or unit == _BYTES[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return ""


def short(count: int) -> str:
    """Formats a count with three figures and the suffix k, M or B: 840704 is 841k."""
    for unit, power in (("B", 9), ("M", 6), ("k", 3)):
        if count >= 10**power:
            return f"{count / 10**power:.3g}{unit}"
    return str(count)


def clock(seconds: float) -> str:
    """Formats a duration in seconds as on a clock: 75 is 1:15, 3675 is 1:01:15."""
    if not math.isfinite(seconds):
        return "–:––"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: Iterable[float]) -> str:
    """Returns a row of bars, one character per value, whose heights are proportional to the values.

    >>> sparkline([0, 1, 2, 4])
    '▁▃▅█'
    """
    given = list(values)
    most = max(given, default=0.0)
    return "".join(_BARS[round(max(0.0, value) / most * (len(_BARS) - 1))] if most > 0 else _BARS[0] for value in given)


def decimals(value: float | None) -> str:
    """Formats a value with four decimals; None gives `no`."""
    return "no" if value is None else f"{value:.4f}"


def output() -> Console:
    """Returns a console for standard output, as wide as its terminal, or `WIDTH` columns wide for a file or pipe."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def one_line(text: str) -> str:
    """Returns the text with a visible sign instead of each character that controls a terminal: line ends, escapes, text
    directions."""
    return "".join(letter if letter.isprintable() else "⏎" if letter == "\n" else "·" for letter in text)


def unbroken(text: str) -> Text:
    """Returns a rich text whose lines are never wrapped, so that they can be copied: a path, a config."""
    return Text(text, no_wrap=True, overflow="ignore")


def dim(text: str) -> Text:
    """Returns a dimmed rich text, for a line that explains the lines before it."""
    return Text(text, style="dim")


class Printed:
    """Base of results for a terminal: `print(result)` gives the same text as the command line.

    A subclass has `lines` and `to_dict`; `__rich__` gives the lines to rich's consoles, with colours, at their
    width.
    """

    raw: ClassVar[bool] = False
    """True if the lines are input of other programs: the command line then prints them unwrapped."""

    def to_dict(self) -> Any:
        """Returns the result as plain values, which JSON can hold.

        Returns
        -------
        dict or list
            The content that --json prints.

        Examples
        --------
        >>> found = gf.claims("gqa-cache")
        >>> found.to_dict()[0]["verdict"]
        'holds'
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raises WorkError if a part of the work failed; the command line then ends with an error after the text.

        Examples
        --------
        >>> found.check()
        """

    def lines(self) -> Iterator[str | RenderableType]:
        """Returns an iterator over the parts of the result's text from top to bottom.

        Returns
        -------
        iterator of str or rich.console.RenderableType
            Literal strings, tables, and rich's `Text` if a line has a style.

        Examples
        --------
        >>> print(next(found.lines()))
        The cache of grouped-query attention is g/n of the whole: a third with 4 of 12 heads, 8 % with one.
        """
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """Returns the result's lines as HTML, for a notebook."""
        return tag("div", *map(_html, self.lines()))

    def __rich__(self) -> Group:
        return Group(*(Text(one) if isinstance(one, str) else one for one in self.lines()))

    def __str__(self) -> str:
        """Returns the result's lines as text without colours, `WIDTH` columns wide."""
        target = io.StringIO()
        Console(file=target, width=WIDTH, color_system=None, highlight=False).print(self, crop=False)
        return "\n".join(line.rstrip() for line in target.getvalue().splitlines())


class Reported(Printed):
    """Base of printed results that can be written as an HTML page."""

    def html(self) -> str:
        """Returns the result as an HTML page, which loads no other files.

        Returns
        -------
        str
            An HTML document.

        Examples
        --------
        >>> found = gf.claims("gqa-cache")
        >>> found.html()[:15]
        '<!doctype html>'
        """
        raise NotImplementedError

    def report(self, path: str | Path) -> Path:
        """Writes the result's HTML page, one file that opens offline.

        Parameters
        ----------
        path
            The file to write; an existing file is replaced atomically.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        WorkError
            If the disk refuses.

        Examples
        --------
        >>> found.report("page.html").name
        'page.html'
        """
        return write_document(self.html(), path)


class Tabular(Printed):
    """Base of printed results that have a table of rows."""

    def records(self) -> Iterable[dict[str, Any]]:
        """Returns the rows of the table.

        Returns
        -------
        iterable of dict
            Rows as {column: value}.

        Examples
        --------
        >>> found = gf.claims("gqa-cache")
        >>> [row["verdict"] for row in found.records()]
        ['holds']
        """
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """Returns the table as a DataFrame.

        Returns
        -------
        pandas.DataFrame
            A row for each of `records`; a dict within a row has one column for each key, such as `validation.loss`.
            Needs pandas.

        Raises
        ------
        ImportError
            Without pandas.

        Examples
        --------
        >>> found.to_pandas()["verdict"].tolist()
        ['holds']
        """
        try:
            import pandas
        except ImportError:
            message = "a table of rows needs pandas: pip install pandas; records() gives the rows without it"
            raise ImportError(message, name="pandas") from None
        return pandas.json_normalize(list(self.records()))


def _html(line: str | RenderableType) -> Markup:
    if not isinstance(line, Table):
        return tag("p", str(line))
    rows = [[str(cell) for cell in row] for row in zip(*(column.cells for column in line.columns), strict=True)]
    return plain_table(str(line.title or ""), [str(column.header) for column in line.columns], rows)
