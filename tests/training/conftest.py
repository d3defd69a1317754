from __future__ import annotations

import random
from pathlib import Path

import pytest

from glassformer.text import TextData, prepare


def sentences(n: int = 4000) -> str:
    """Repetitive English that a small model learns within a few steps."""
    rng = random.Random(0)
    words = [
        "the",
        "a",
        "cat",
        "dog",
        "sat",
        "ran",
        "on",
        "under",
        "mat",
        "tree",
        "and",
        "then",
        "saw",
        "it",
        "again",
        "while",
        "old",
        "new",
    ]
    return "\n".join(" ".join(rng.choices(words, k=8)) + "." for _ in range(n // 8))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextData:
    folder: Path = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(sentences(), encoding="utf-8")
    return prepare(folder / "text.txt", "char", cache_dir=folder / "cache")
