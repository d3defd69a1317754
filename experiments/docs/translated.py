"""docs/zh/*/*.md: Chinese prose with the blocks of the English page.

A line `{block}` in experiments/docs/prose/zh is replaced by the next fenced block of the English page of the same path,
with the comment before it, its output and its pictures; `{block WORDS}` describes the picture in other words. Links are
written as on the English page.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from experiments.docs import DOCS

PROSE = Path(__file__).with_name("prose") / "zh"
CHINESE = DOCS / "zh"
READMES = {DOCS.parent / "README.md": DOCS.parent / "README.zh-CN.md"}
LINK = re.compile(r"\]\(([^)#:]+)((?:#[^)]*)?)\)")
JOINED = re.compile(r"(?<=[\u3000-\u9fff\uff00-\uffef”])\n(?=[\u3000-\u9fff\uff00-\uffef“])")
"""Line end between Chinese characters, which a browser would show as a space."""
BLOCK = re.compile(r"\{block ?(.*)\}")
COMMENT = r"(?:<!--(?:(?!-->).)*-->\n+)?"
PIECE = re.compile(
    rf"^{COMMENT}^```.*?^```$(?:\n\n{COMMENT}(?:^```text\n.*?^```$|^!\[[^\n]*\]\([^\n]*\)$))*", re.DOTALL | re.MULTILINE
)
"""A fenced block with its comment and its output."""
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"!\[[^\]]*\]")


def pages() -> dict[Path, str]:
    """Returns every Chinese page that takes its blocks from an English one, by its path."""
    made = {}
    for prose in sorted(PROSE.rglob("*.md")):
        name = prose.relative_to(PROSE)
        if name.parts[0] != "guides" and (DOCS / name).is_file():
            text = filled(prose.read_text(encoding="utf-8"), (DOCS / name).read_text(encoding="utf-8"))
            made[CHINESE / name] = moved(text, (DOCS / name).parent, (CHINESE / name).parent)
    return made


def filled(prose: str, english: str) -> str:
    """Returns prose with the blocks of an English text in the places of `{block}`; further blocks come last."""
    pieces = [match[0] for match in PIECE.finditer(english)]

    def block(match: re.Match[str]) -> str:
        piece = pieces.pop(0) if pieces else ""
        return PICTURE.sub(lambda _: f"![{match[1]}]", piece) if match[1] else piece

    text = BLOCK.sub(block, prose)
    return "\n\n".join([text.rstrip("\n"), *pieces]) + "\n"


def moved(text: str, english: Path, folder: Path) -> str:
    """Returns a text with links from one folder turned into links from another, to Chinese pages if they exist."""
    if english == folder:
        return text
    prose = [path.relative_to(PROSE) for path in PROSE.rglob("*.md")]

    def link(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(english / match[1]))
        name = target.relative_to(DOCS) if target.is_relative_to(DOCS) else None
        there = name is not None and (name in prose or (CHINESE / name).is_file())
        chosen = CHINESE / name if there and name is not None else READMES.get(target, target)
        return f"]({os.path.relpath(chosen, folder)}{match[2]})"

    parts = FENCE.split(JOINED.sub("", text))
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def write() -> None:
    """Writes the pages."""
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
