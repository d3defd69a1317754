"""Text from outside keeps its brackets: rich would read [hf], [bold] and [/] as markup."""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

import glassformer
from glassformer.errors import RequestError
from glassformer.figures.terminal import Printed, TextTable, bare, dim, ruled, unbroken, unruled
from glassformer.laboratory.proof import Proof, Row
from glassformer.runs.events import Begin, ReadingEvent, StageEvent
from glassformer.runs.live import ComparisonView

SRC = Path(glassformer.__file__).parent
BRACKETS = "a[hf] [bold]b[/bold] [/] \\[c] [d]e"


class Lines(Printed):
    """A value of one line."""

    def __init__(self, line: str | RenderableType):
        self.line = line

    def lines(self) -> Iterator[str | RenderableType]:
        yield self.line


def table(made: TextTable) -> TextTable:
    made.add_column(BRACKETS)
    made.add_column(BRACKETS, justify="right")
    made.add_row(BRACKETS, Text(BRACKETS))
    return made


@pytest.mark.parametrize(
    ("value", "times"),
    [
        (Lines(BRACKETS), 1),
        (Lines(dim(BRACKETS)), 1),
        (Lines(unbroken(BRACKETS)), 1),
        (Lines(table(ruled(BRACKETS))), 5),
        (Lines(table(unruled(BRACKETS))), 5),
        (Lines(table(bare())), 2),
        (Proof((Row("decoding", BRACKETS, "skipped", note=BRACKETS),), BRACKETS), 3),
    ],
    ids=["line", "dim", "unbroken", "ruled", "unruled", "bare", "check"],
)
def test_brackets_are_printed(value: Printed, times: int) -> None:
    shown = io.StringIO()
    Console(file=shown, width=400).print(value)
    assert shown.getvalue().count(BRACKETS) >= times
    assert str(value).count(BRACKETS.split()[0]) >= times


@pytest.mark.parametrize("terminal", [True, False])
def test_brackets_of_progress_are_printed(terminal: bool) -> None:
    shown = io.StringIO()
    view = ComparisonView()
    view.bars.live.console = view.console = Console(file=shown, width=400, force_terminal=terminal)
    view.plain = not terminal
    with view:
        view.event(StageEvent(words=BRACKETS))
        view.event(Begin(how="", notes=[BRACKETS], runs=[(BRACKETS, 0)]))
        view.event(ReadingEvent(stage=BRACKETS, done=1, total=3))
        view.bars.refresh()
    assert shown.getvalue().count("[bold]b[/bold]") >= (4 if terminal else 2)


def loose(text: str) -> list[int]:
    """Lines of code that let rich read markup: another table, a column of progress, an f-string."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            markup = any(one.arg == "markup" and getattr(one.value, "value", None) is False for one in node.keywords)
            plain = node.args and isinstance(node.args[0], ast.Constant | ast.JoinedStr)
            printed = name == "print" and isinstance(node.func, ast.Attribute) and plain
            if name == "Table" or (name in ("TextColumn",) and not markup) or (printed and not markup):
                found.append(node.lineno)
    return found


def test_no_file_lets_rich_read_markup() -> None:
    assert {path.name: lines for path in SRC.rglob("*.py") if (lines := loose(path.read_text("utf-8")))} == {}


@pytest.mark.parametrize("line", ["Table(title=x)", "TextColumn('{task.description}')", "console.print(f'{x}')"])
def test_loose_markup_is_seen(line: str) -> None:
    assert loose(line) == [1]


def test_the_way_to_the_reference_is_printed_whole() -> None:
    """`check` without transformers: the extra's name is in brackets."""
    note = "the reference is transformers: pip install 'glassformer[hf]'"
    assert note in str(Proof((Row("reference", "logits", "skipped", note=note),), "x"))
    assert "[hf]" in str(RequestError(note, code="missing", field="transformers"))
