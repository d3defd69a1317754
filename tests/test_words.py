"""Words: phrases that make a reader read twice only become fewer, and `words_only` sees a change of code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import words, words_only

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not ((ROOT / ".git").exists() and shutil.which("git")), reason="the list of files comes from git")
def test_no_file_exceeds_its_baseline():
    excesses = words.excesses()
    assert not excesses, "\n".join([*excesses, "after a move: python tools/words.py --move OLD NEW"])


def test_the_baseline_names_files_that_exist():
    assert not [name for name in words.baseline() if not (ROOT / name).is_file()]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ('def f():\n    """Whether it fits."""\n', ["Whether"]),
        ('def f():\n    """Returns True if it fits."""\n', []),
        ('X = 1\n"""What a run leaves."""\n', ["What"]),
        ('class C:\n    """Of the layers, one."""\n', ["Of"]),
        ("x = 1  # nobody reads it\n", ["nobody"]),
        ('x = f"{1} stands there"\n', ["stands"]),
        ('x = "stands"\n', []),  # a word is a name, not a sentence
        ('BEGIN = "<|begin_of_text|> comes first"\n', []),
    ],
)
def test_phrase_in_python_is_seen(text: str, seen: list[str], tmp_path: Path):
    path = tmp_path / "a.py"
    path.write_text(text)
    assert [found for _, found, _ in words.phrases(path)] == seen


def test_phrase_in_markdown_is_seen_outside_code(tmp_path: Path):
    path = tmp_path / "a.md"
    path.write_text("A line.\n```\nnobody\n```\nIt goes on.\n")
    assert [(line, found) for line, found, _ in words.phrases(path)] == [(5, "goes on")]


BEFORE = '"""A module."""\n\n\ndef f(x):\n    """Adds."""\n    return x + 1  # one\n'


@pytest.mark.parametrize(
    ("after", "docstrings_only", "strings_too"),
    [
        (BEFORE.replace("Adds.", "Returns the sum.").replace("# one", "# because"), True, True),
        (BEFORE.replace('    """Adds."""\n', ""), True, True),
        (BEFORE.replace("x + 1", 'x + "a"'), False, False),
        (BEFORE.replace("# one", "# noqa"), False, False),
    ],
)
def test_words_only_distinguishes_words_from_code(after: str, docstrings_only: bool, strings_too: bool):
    assert (words_only.code_of(BEFORE) == words_only.code_of(after)) is docstrings_only
    assert (words_only.code_of(BEFORE, True) == words_only.code_of(after, True)) is strings_too


def test_words_only_lets_sentences_change_if_asked():
    a, b = 'raise E(f"no {x} for {y}")', 'raise E(f"{x} without {y}!")'
    assert words_only.code_of(a) != words_only.code_of(b)
    assert words_only.code_of(a, True) == words_only.code_of(b, True)
    assert words_only.code_of(a, True) != words_only.code_of('raise E(f"{y} without {x}")', True)


def test_words_only_compares_commits(tmp_path: Path):
    def git(*args: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd=tmp_path, check=True, capture_output=True
        )

    def status(*args: str) -> int:
        tool = ROOT / "tools" / "words_only.py"
        return subprocess.run(
            [sys.executable, str(tool), *args], cwd=tmp_path, check=False, capture_output=True
        ).returncode

    git("init", "-q")
    for text in (BEFORE, BEFORE.replace("Adds.", "Returns the sum."), BEFORE.replace("x + 1", "x + 2")):
        (tmp_path / "a.py").write_text(text)
        git("add", "a.py")
        git("commit", "-qm", "x")
    assert status("HEAD~2", "HEAD~1") == 0
    assert status("HEAD~1", "HEAD") == 1
    assert status("HEAD") == 0
