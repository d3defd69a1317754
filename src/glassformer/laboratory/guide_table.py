"""Guides to the transformer, item by item: the command that shows each item, and corrections of wrong values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from glassformer.config import read_tree, validated
from glassformer.figures.terminal import Tabular, TextTable, dim, ruled
from glassformer.names.checks import check_guide
from glassformer.names.known import GUIDES
from glassformer.parts.core.base import Value

FOLDER = Path(__file__).with_name("guide_tables")
PROGRAM = "glassformer "
"""Prefix of a command of the command line; any other command is Python."""
VERDICTS = ("works", "half", "missing", "no system")
HOW = (
    "A command without `glassformer`, `python` or `jupyter` is Python, after `import torch; import glassformer as gf`."
)
"""Explanation of the commands."""

Words = Annotated[str, Field(min_length=1, max_length=400)]


class Correction(Value):
    """Correction of a value or a statement in a guide that is wrong."""

    guide: Words
    """Value or statement in the guide."""
    ours: Words
    """Value or statement that replaces it."""
    source: Words
    """Paper, computation or claim that decides."""


class GuideRow(Value):
    """An item of a guide and the command that shows it."""

    item: str = Field(pattern=r"^00[0-4]-[1-9][0-9]?$")
    """Number of the guide and of the item within it."""
    source: Words
    """Content of the item, in a few words."""
    command: Words | None = None
    """Command that shows the item: of the command line, or Python. None if no command does."""
    expected: tuple[Words, ...] = Field((), max_length=12)
    """Texts that the output of the command contains."""
    shown: tuple[Words, ...] = Field((), max_length=12)
    """Lines of the output that pages show; a quick command prints each of them, up to spaces."""
    verdict: Literal["works", "half", "missing", "no system"]
    """works; half or missing: not closed yet; no system: nothing to build or to measure."""
    reason: Words | None = None
    """Explanation of every verdict but works; for works, the part of the item that its command does not show."""
    quick: bool = False
    """True if the command ends within seconds on two cores, offline."""
    guide_says: Correction | None = None
    """Correction of the guide; None without one."""

    @model_validator(mode="after")
    def _complete(self) -> GuideRow:
        if self.verdict == "works" and self.command is None:
            raise ValueError("an item that works needs a command")
        if self.verdict != "works" and self.reason is None:
            raise ValueError("a verdict other than works needs a reason")
        if self.quick and not (self.command and self.expected):
            raise ValueError("a quick command needs the expected texts of its output")
        return self


class GuideTable(Value):
    """Table of the items of one guide."""

    rows: tuple[GuideRow, ...] = Field(min_length=1, max_length=99)


@dataclass(frozen=True)
class Guides(Tabular):
    """Items of the guides, each with its command and verdict; `print` shows them, counts and corrected values.

    Attributes
    ----------
    rows : tuple of GuideRow
        The items; `found["002-7"]` is one by its number.

    Examples
    --------
    >>> found = gf.guides("first-lesson")
    >>> found["002-7"].verdict
    'works'
    """

    rows: tuple[GuideRow, ...]

    def __getitem__(self, item: str) -> GuideRow:
        """Returns an item of the guides by its number, such as "002-7"."""
        return {row.item: row for row in self.rows}[item]

    @property
    def counts(self) -> dict[str, int]:
        """Number of the guides' items with each verdict, by verdict."""
        found = Counter[str](row.verdict for row in self.rows)
        return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}

    @property
    def corrections(self) -> dict[str, Correction]:
        """Corrections of the guides' wrong values, by item number."""
        return {row.item: row.guide_says for row in self.rows if row.guide_says is not None}

    def lines(self) -> Iterator[Any]:
        """Yields a table of the items, their count by verdict, and a table of the guides' wrong values."""
        table = ruled()
        for heading in ("item", "content", "command", "verdict"):
            table.add_column(heading, overflow="fold")
        for row in self.rows:
            told = [words for words in (row.command, row.reason) if words]
            table.add_row(row.item, row.source, "\n".join(told), row.verdict)
        yield table
        yield f"{len(self.rows)} items: {self.summary}"
        yield dim(HOW)
        if self.corrections:
            yield self._corrections()

    @property
    def summary(self) -> str:
        """Sentence with the number of the guides' items by verdict."""
        return ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())

    def _corrections(self) -> TextTable:
        table = ruled(f"{len(self.corrections)} corrections")
        for heading in ("item", "the guide", "here", "source"):
            table.add_column(heading, overflow="fold")
        for item, one in self.corrections.items():
            table.add_row(item, one.guide, one.ours, one.source)
        return table

    def to_dict(self) -> dict[str, Any]:
        return {"rows": self.records(), "count": self.counts}

    def records(self) -> list[dict[str, Any]]:
        """Returns a table row for each item of the guides, with all its fields."""
        return [row.model_dump(mode="json") for row in self.rows]


@cache
def guide_tables() -> dict[str, GuideTable]:
    """Returns {name of a guide: its table}, in the order of the item numbers."""
    return {
        name: validated(GuideTable, read_tree(path), "guide", path.name)
        for name in GUIDES
        for path in [FOLDER / f"{name}.yaml"]
    }


def guides(guide: str | None = None) -> Guides:
    """Lists the items of five guides to the transformer, each with the command that shows it.

    Parameters
    ----------
    guide
        Name of one guide: in-depth, mathematics, first-lesson, architecture or core. If None, all are listed.

    Returns
    -------
    Guides
        The items with command and verdict, and corrections of the guides.

    Raises
    ------
    RequestError
        If no guide has the name.

    Examples
    --------
    >>> gf.guides()["002-7"].command
    'glassformer claims qwen3-embedding'
    """
    if guide is not None:
        check_guide(guide)
    chosen = GUIDES if guide is None else [guide]
    return Guides(tuple(row for name in chosen for row in guide_tables()[name].rows))
