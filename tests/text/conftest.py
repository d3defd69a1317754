"""A separate cache for each test, and texts to read."""

from __future__ import annotations

from pathlib import Path

import pytest

WORDS = "the cat sat on a mat and saw two birds under an old tree near water"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("GLASSFORMER_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def story() -> str:
    """3000 different lines of small words."""
    words = WORDS.split()
    return "\n".join(
        f"{number}: " + " ".join(words[(number * k + k) % len(words)] for k in range(1, 9)) for number in range(3000)
    )
