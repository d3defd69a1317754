"""Chinese pages whose English source has changed since they were translated.

    python -m tools.translations                lists them
    python -m tools.translations --accept PAGE  writes the hash of today's English text into a page

A Chinese page names its English source and the hash of its text in its front matter. The hash leaves out blocks of
output, so that a new measurement does not make a translation old. A changed source is listed and fails no test.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.zh-CN.md"
PROSE = ROOT / "experiments" / "docs" / "prose"
"""Prose of generated pages, whose front matter they copy."""
FRONT = re.compile(r"\A(?:---|<!--)\nsource: (\S+)\nsource_hash: ([0-9a-f]{12})\n(?:---|-->)\n")
"""Front matter, or a comment on pages that are read on GitHub first."""
OUTPUT = re.compile(r"(?ms)^```text\n.*?^```$\n?|^(?:Before|Next): \[[^\n]*\n")
"""Blocks of output, and links between neighbouring tutorials."""


def chinese_pages() -> list[Path]:
    """Returns the Chinese pages."""
    return [*sorted((DOCS / "zh").rglob("*.md")), *([README] if README.is_file() else [])]


def source_of(page: Path) -> Path:
    """Returns the English page that a Chinese page names; raises ValueError without front matter."""
    return (page.parent / _front(page)[0]).resolve()


def hash_of(source: Path) -> str:
    """Returns the hash of an English page without its blocks of output and its links to neighbours."""
    text = OUTPUT.sub("", source.read_text(encoding="utf-8"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def outdated() -> Iterator[Path]:
    """Yields the Chinese pages whose English source has another hash than they name."""
    for page in chinese_pages():
        if _front(page)[1] != hash_of(source_of(page)):
            yield page


def accept(page: Path) -> None:
    """Writes the hash of today's English text into a page, and into its prose if it is generated."""
    held, fresh = _front(page)[1], hash_of(source_of(page))
    prose = PROSE / "zh" / page.relative_to(DOCS / "zh") if page.is_relative_to(DOCS / "zh") else page
    for file in {page, prose}:
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace(f"source_hash: {held}", f"source_hash: {fresh}", 1), encoding="utf-8")


def _front(page: Path) -> tuple[str, str]:
    match = FRONT.match(page.read_text(encoding="utf-8"))
    if match is None:
        raise ValueError(f"{page.relative_to(ROOT)} needs front matter: source: PAGE, source_hash: 12 hex digits")
    return match[1], match[2]


def main(arguments: Sequence[str]) -> int:
    """Lists outdated pages, or accepts those that are named."""
    if arguments[:1] == ["--accept"]:
        for name in arguments[1:]:
            accept(Path(name).resolve())
        return 0
    found = list(outdated())
    for page in found:
        print(f"{page.relative_to(ROOT)}: {source_of(page).relative_to(ROOT)} has changed")
    print(f"{len(found)} of {len(chinese_pages())} Chinese pages are older than their source")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
