"""Printed results as plain data for a page: the lines that a terminal shows, as texts and tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


def blocks(lines: Iterable[str | RenderableType]) -> list[dict[str, Any]]:
    """Returns each line of a printed result as `{"text"}` or as `{"title", "headings", "numbers", "rows"}`.

    `numbers` names the columns that are aligned right."""
    return [_block(line) for line in lines if line]


def _block(line: str | RenderableType) -> dict[str, Any]:
    if not isinstance(line, Table):
        return {"text": str(line), **({"quiet": True} if isinstance(line, Text) and line.style == "dim" else {})}
    columns = [[str(cell) for cell in column.cells] for column in line.columns]
    return {
        "title": str(line.title or ""),
        "headings": [str(column.header) for column in line.columns],
        "numbers": [column.justify == "right" for column in line.columns],
        "rows": [list(row) for row in zip(*columns, strict=True)],
    }
