"""Chinese pages name an English source, and have its blocks, its tables and its pictures.

An English page that changes makes its Chinese page outdated and fails no test here: `python -m tools.translations`
lists such pages.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.docs import chapters, translated
from glassformer.names.known import GUIDES
from tools import translations
from tools.translations import DOCS, README, ROOT, chinese_pages, source_of

FENCE = re.compile(r"(?ms)^(`{3,})(.*?)\n(.*?)^\1$")
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
TOKEN = re.compile(r"`[^`]+`|https?://[^)\s]+|\d+(?:[,.]\d+)*(?:e[+-]?\d+)?")
PAGES = chinese_pages()
OUTDATED = set(translations.outdated())
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path) -> list[tuple[str, str]]:
    """Returns language and text of each fenced block."""
    return [(language, text) for _, language, text in FENCE.findall(page.read_text(encoding="utf-8"))]


def tables(page: Path) -> list[list[str]]:
    """Returns the code, the addresses and the numbers of each row of a table, in the order of the alphabet."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return [sorted(TOKEN.findall(line)) for line in text.splitlines() if line.startswith("|")]


def pictures(page: Path) -> list[Path]:
    """Returns the files of a page's pictures."""
    found = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    return [(page.parent / target).resolve() for target in found]


@every_page
def test_source_is_the_english_page_of_the_same_path(page: Path) -> None:
    mirrored = ROOT / "README.md" if page == README else DOCS / page.relative_to(DOCS / "zh")
    assert source_of(page) == mirrored and mirrored.is_file()


@every_page
def test_blocks_tables_and_pictures_are_those_of_the_source(page: Path) -> None:
    """A page whose source has changed since is only listed."""
    source = source_of(page)
    if page in OUTDATED:
        pytest.skip(f"{source.relative_to(ROOT)} has changed since: python -m tools.translations")
    assert blocks(page) == blocks(source)
    assert tables(page) == tables(source)
    assert pictures(page) == pictures(source)


def dead_links(page: Path) -> set[Path]:
    """Returns the files that a page links and that do not exist."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = {(page.parent / one).resolve() for one in LINK.findall(text) if ":" not in one}
    return {target for target in targets if not target.exists()}


@every_page
def test_links_lead_to_files(page: Path) -> None:
    """Links that are dead in the English page too are its own matter."""
    assert not dead_links(page) - dead_links(source_of(page))


def test_links_of_pages_along_the_guides_lead_to_files() -> None:
    assert not [dead for page in (DOCS / "guides").glob("*.md") for dead in dead_links(page)]


def test_hash_leaves_out_output(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n```text\n1\n```\nb\n", encoding="utf-8")
    before = translations.hash_of(page)
    page.write_text("a\n```text\n2\n3\n```\nb\n", encoding="utf-8")
    assert translations.hash_of(page) == before
    page.write_text("a\n```text\n2\n```\nc\n", encoding="utf-8")
    assert translations.hash_of(page) != before


def test_changed_source_is_listed_until_it_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROOT", "DOCS", "README", "PROSE"):
        where = {"ROOT": "", "DOCS": "docs", "README": "README.zh-CN.md", "PROSE": "prose"}[name]
        monkeypatch.setattr(translations, name, tmp_path / where)
    english, chinese = tmp_path / "docs" / "a.md", tmp_path / "docs" / "zh" / "a.md"
    chinese.parent.mkdir(parents=True)
    english.write_text("one\n", encoding="utf-8")
    chinese.write_text("---\nsource: ../a.md\nsource_hash: 000000000000\n---\n一\n", encoding="utf-8")
    assert list(translations.outdated()) == [chinese]
    translations.accept(chinese)
    assert not list(translations.outdated())
    english.write_text("two\n", encoding="utf-8")
    assert list(translations.outdated()) == [chinese]
    chinese.write_text("一\n", encoding="utf-8")
    with pytest.raises(ValueError):
        list(translations.outdated())


def test_pages_along_the_guides_are_fresh() -> None:
    made = chapters.guide_pages()
    assert {path for one in chapters.LANGUAGES for path in one.folder.glob("*.md")} == set(made)
    assert not stale(made), "run python -m experiments.docs guides"


def test_chinese_pages_have_the_blocks_of_today() -> None:
    made = {path: text for path, text in translated.pages().items() if path not in OUTDATED}
    assert not stale(made), "run python -m experiments.docs --words guides"


def stale(made: dict[Path, str]) -> list[str]:
    """Returns the files that differ from their text."""
    return [str(path.relative_to(ROOT)) for path, text in made.items() if path.read_text(encoding="utf-8") != text]


def test_blocks_of_an_english_page_take_the_places_in_prose() -> None:
    english = "a\n\n<!-- fails -->\n```bash\nx\n```\n\n```text\n1\n```\n\n![p](f.png)\n\nb\n\n```python\ny\n```\n"
    first = "<!-- fails -->\n```bash\nx\n```\n\n```text\n1\n```\n\n"
    assert translated.filled("一\n\n{block 图}\n", english) == f"一\n\n{first}![图](f.png)\n\n```python\ny\n```\n"
    assert translated.filled("{block}\n\n二\n\n{block}\n\n{block}\n", english).endswith("二\n\n```python\ny\n```\n")


@pytest.mark.parametrize("language", chapters.LANGUAGES, ids=["english", "chinese"])
@pytest.mark.parametrize("guide", GUIDES)
def test_prose_has_every_item_of_its_guide_once(guide: str, language: chapters.Language) -> None:
    path = language.prose / f"{guide}.md"
    rows = {row.item: row for row in chapters.guides(guide).rows}
    entries = list(chapters.entries(path.read_text(encoding="utf-8")))
    assert sorted(one.row.item for one in entries) == sorted(rows)
    assert all(one.content for one in entries)
    assert all(one.guide and one.ours for one in entries if one.row.guide_says is not None)


def test_chinese_item_has_its_own_words() -> None:
    """Items of Chinese prose are not filled in from the English table."""
    for path in chapters.CHINESE.prose.glob("*.md"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if match := chapters.ITEM.fullmatch(line):
                assert match[2], line
