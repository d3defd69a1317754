"""The token of a folder is kept for its next studio, and from other users."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from glassformer.studio.secret import TOKEN, token_file, token_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_next_start_over_a_folder_has_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = token_of(tmp_path / "runs")
    assert TOKEN.fullmatch(first) and token_of(tmp_path / "runs") == first
    assert token_of(tmp_path / "other") != first
    monkeypatch.chdir(tmp_path)
    assert token_of(Path("runs")) == first and not (tmp_path / "runs").exists()
    token_file(tmp_path / "runs").unlink()
    assert token_of(tmp_path / "runs") != first


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_token_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    first, file = token_of(tmp_path), token_file(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    second = token_of(tmp_path)
    assert second != first and stat.S_IMODE(file.stat().st_mode) == 0o600
    other = tmp_path / "elsewhere"
    other.write_text(first)
    other.chmod(0o600)
    file.unlink()
    file.symlink_to(other)
    assert token_of(tmp_path) != first


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33, b"a b" * 20, b"\xff" * 32])
def test_damaged_token_is_replaced(tmp_path: Path, content: bytes) -> None:
    token_of(tmp_path)
    token_file(tmp_path).write_bytes(content)
    found = token_of(tmp_path)
    assert TOKEN.fullmatch(found) and token_of(tmp_path) == found


def test_cache_that_cannot_be_written_gives_a_token_for_this_start(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file in the place of the folder")
    assert TOKEN.fullmatch(token_of(tmp_path)) and token_of(tmp_path) != token_of(tmp_path)
