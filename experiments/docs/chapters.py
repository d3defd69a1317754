"""docs/guides/*.md and docs/zh/guides/*.md: the guides chapter by chapter.

The prose of a chapter is Markdown in experiments/docs/prose; a line `{000-12}` in it is replaced by that item of
`guide_tables`: its content, its correction, its command and the lines of its output. Items of neighbouring lines share
a command. Chinese prose gives the words of an item as well: its content behind the brace, then `> guide | here` for a
correction and `! reason` for a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from experiments.docs import DOCS, escaped, translated
from glassformer.laboratory.evidence import ClaimRow, overview
from glassformer.laboratory.evidence.stored import MEASURED
from glassformer.laboratory.guide_table import PROGRAM, GuideRow, guides
from glassformer.laboratory.pages.claim_page import asked_words, figure_words, verdict_of
from glassformer.names.known import GUIDES
from glassformer.names.papers import NUMBER, papers

PROSE = Path(__file__).with_name("prose")
CLAIMS = f"{PROGRAM}claims "
ITEM = re.compile(r"\{(00\d-\d+)\} ?(.*)")
MOST = 8
"""Figures of a claim that a page shows."""


@dataclass(frozen=True)
class Language:
    """Words of a language around the items, and where its pages are."""

    folder: Path
    prose: Path
    guide: str
    """Opening of a correction, before the words of the guide."""
    here: str
    source: str
    stop: str
    """End of a sentence."""
    claim: str
    """A claim as a source, with {} for its name."""
    verdicts: dict[str, str]


ENGLISH = Language(
    DOCS / "guides", PROSE / "guides", "*The guide:* ", " *Here:* ", " *Source:* ", ".", "claim {}",
    {"works": "Note", "half": "Half", "missing": "Missing", "no system": "Nothing to build"},
)  # fmt: skip
CHINESE = Language(
    DOCS / "zh" / "guides", PROSE / "zh" / "guides", "*教程写的是：*", "*实际是：*", "*依据：*", "。", "断言 {}",
    {"works": "说明", "half": "只做到一半", "missing": "尚缺", "no system": "无需实现"},
)  # fmt: skip
LANGUAGES = (ENGLISH, CHINESE)


@dataclass
class Entry:
    """An item in the words of a page's language."""

    row: GuideRow
    content: str
    guide: str = ""
    ours: str = ""
    reason: str = ""


def guide_pages() -> dict[Path, str]:
    """Returns every page along a guide that has prose, by its path."""
    return {
        one.folder / f"{name}.md": page(name, one)
        for one in LANGUAGES
        for name in GUIDES
        if (one.prose / f"{name}.md").is_file()
    }


def write() -> None:
    """Writes every page along a guide."""
    for path, text in guide_pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def page(guide: str, language: Language) -> str:
    """Returns the page along a guide, with its items in the places of their numbers."""
    text = (language.prose / f"{guide}.md").read_text(encoding="utf-8")
    made: list[str] = []
    for piece in _pieces(text):
        made += [piece] if isinstance(piece, str) else _group(piece, language)
    return translated.moved("\n".join(made).rstrip("\n") + "\n", ENGLISH.folder, language.folder)


def entries(text: str) -> Iterator[Entry]:
    """Yields the items of a guide's prose."""
    for piece in _pieces(text):
        yield from () if isinstance(piece, str) else piece


def _pieces(text: str) -> Iterator[str | list[Entry]]:
    """Yields lines of prose, and the items of neighbouring lines together."""
    group: list[Entry] = []
    for line in [*text.splitlines(), ""]:
        if match := ITEM.fullmatch(line):
            group.append(_entry(match[1], match[2]))
        elif group and line.startswith("> "):
            group[-1].guide, _, group[-1].ours = line[2:].partition(" | ")
        elif group and line.startswith("! "):
            group[-1].reason = line[2:]
        else:
            if group:
                yield group
                group = []
            yield line


def _entry(item: str, content: str) -> Entry:
    """Returns an item in the words of the table, with other words for its content if there are any."""
    row = guides()[item]
    says = row.guide_says
    corrected = ("", "") if says is None else (escaped(says.guide), escaped(says.ours))
    return Entry(row, content or escaped(row.source), *corrected, escaped(row.reason or ""))


def _group(entries: Sequence[Entry], language: Language) -> Iterator[str]:
    """Yields the lines of items that share a place: a list of them, then each command with its output."""
    for one in entries:
        yield f"- **{one.row.item}** {one.content}"
        if one.row.reason is not None:
            yield f"  - *{language.verdicts[one.row.verdict]}:* {one.reason}{language.stop}"
        if one.row.guide_says is not None:
            says = f"{language.guide}{one.guide}{language.stop}{language.here}{one.ours}{language.stop}"
            yield f"  - {says}{language.source}{_source(one.row.guide_says.source, language)}{language.stop}"
    shown: dict[str, list[str]] = {}
    for one in entries:
        if one.row.command:
            lines = shown.setdefault(one.row.command, [])
            lines += [line for line in one.row.shown if line not in lines]
    for command, lines in shown.items():
        if command.startswith((PROGRAM, "python ", "jupyter ")):
            yield from ("", "```bash", command, "```")
        else:
            yield from ("", "```python", *statements(command), "```")
        if command.startswith(CLAIMS):
            lines = [line for name in command.split()[2:] if name in _claims() for line in outcome(_claims()[name])]
        if lines:
            yield from ("", "```text", *lines, "```")


def statements(command: str) -> list[str]:
    """Returns the statements of one line of Python as lines, with an empty one behind the imports."""
    lines = command.split("; ")
    imports = sum(line.startswith(("from ", "import ")) for line in lines)
    return [*lines[:imports], *([""] if imports else []), *lines[imports:]]


@cache
def _claims() -> dict[str, ClaimRow]:
    return {row.name: row for row in overview(MEASURED)}


def outcome(row: ClaimRow) -> Iterable[str]:
    """Yields a claim's verdict and the figures that decide it, as its measurement has stored them."""
    if row.result is None:
        return [f"{row.name}: {verdict_of(row)}"]
    judged = [one for one in row.result.outcome.figures if one.judged][:MOST]
    width = max((len(one.name) for one in judged), default=0)
    figures = [f"  {one.name:{width}}  {figure_words(one)}  (asked: {asked_words(one)})" for one in judged]
    return [f"{row.name}: {row.result.words}", *figures]


def _source(text: str, language: Language) -> str:
    """Returns a source with links: to the list of claims, and to the papers by their numbers on arXiv."""

    def named(match: re.Match[str]) -> str:
        names = match[1].split(", ")
        return ", ".join(language.claim.format(f"[{name}](../claims.md)") for name in names)

    def paper(match: re.Match[str]) -> str:
        one = papers()[match[0]]
        return f"[{one.authors}]({one.address})"

    linked = re.sub(r"claims? ([a-z0-9-]+(?:, [a-z0-9-]+)*)", named, text)
    linked = NUMBER.sub(paper, linked)
    return re.sub(rf"{PROGRAM}[^;]+", lambda match: f"`{match[0]}`", linked)
