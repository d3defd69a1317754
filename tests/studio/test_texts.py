"""Texts dropped onto the page: whole or not at all, under plain names, as text whatever they are called."""

from __future__ import annotations

import base64
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from glassformer.studio.bodies import TextPieceRequest
from glassformer.studio.texts import LARGEST, MOST, NAME, Texts, plain_name
from tests.refused import failed, refused


def piece(
    content: bytes, name: str = "story.txt", at: int = 0, size: int | None = None, upload: str = "0" * 16
) -> TextPieceRequest:
    return TextPieceRequest(
        upload=upload, name=name, size=len(content) if size is None else size, at=at,
        content=base64.b64encode(content).decode(),
    )  # fmt: skip


def test_text_in_pieces_is_the_file(tmp_path: Path) -> None:
    texts, content = Texts(tmp_path / "texts"), "Es war einmal eine Königin. 从前有座山。\n".encode() * 50
    for at in range(0, len(content), 777):  # pieces end inside characters
        found = texts.take(piece(content[at : at + 777], at=at, size=len(content)))
        assert found["complete"] == (at + 777 >= len(content))
        assert texts.names() == (["story.txt"] if found["complete"] else [])
    path = texts.path("story.txt")
    assert path is not None and path.read_bytes() == content and os.listdir(tmp_path / "texts") == ["story.txt"]


def test_two_gigabytes_are_refused_with_the_first_request(tmp_path: Path) -> None:
    with refused(code="range", field="size"):
        Texts(tmp_path / "texts").take(piece(b"a" * 1000, size=2 << 30))
    with refused(code="range", field="size"):
        Texts(tmp_path / "texts").take(piece(b"a", size=LARGEST + 1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"PK\x03\x04" + b"\0" * 100, "type"), (b"abc\0def", "type"), (bytes(range(128, 256)) * 8, "damaged"),
     (b"%PDF-1.7 words", "type")],
)  # fmt: skip
def test_invalid_text_is_refused_and_not_kept(tmp_path: Path, content: bytes, code: Any) -> None:
    with refused(code=code, field="data"):
        Texts(tmp_path / "texts").take(piece(content))
    assert os.listdir(tmp_path / "texts") == []


def test_empty_file_and_invalid_pieces_are_refused(tmp_path: Path) -> None:
    texts = Texts(tmp_path)
    with refused(code="missing", field="size"):
        texts.take(piece(b""))
    with refused(code="syntax", field="content"):
        texts.take(TextPieceRequest(upload="0" * 16, name="a", size=3, content="é$"))
    texts.take(piece(b"abc", size=9))
    for wrong in (piece(b"abc", at=6, size=9), piece(b"abcdefghij", at=3, size=9)):
        with refused(code="conflict", field="at"):
            texts.take(wrong)
        assert texts.names() == [] and os.listdir(tmp_path) == []
        texts.take(piece(b"abc", size=9))
    texts.take(piece(b"abc", size=6))  # starts again
    assert texts.take(piece(b"def", at=3, size=6))["complete"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a b.txt", "a b.txt"), ("../../etc/passwd", "etc-passwd.txt"), ("红楼梦.txt", "红楼梦.txt"),
     ("ids.bin", "ids.bin.txt"), ("x.jsonl,column=text", "x.jsonl-column-text.txt"),
     ("-rf", "rf.txt"), ("..", None), ("/", None), ("\0", None),
     ("a" * 255, "a" * 64 + ".txt"), ("字" * 255, None)],
)  # fmt: skip
def test_name_of_a_text_is_never_a_path(name: str, expected: str | None) -> None:
    if expected is None and "字" not in name:
        with refused(code="syntax", field="name"):
            plain_name(name)
        return
    found = plain_name(name)
    assert NAME.fullmatch(found) and len(found.encode()) <= 200 and found == (expected or found)


def test_other_text_of_the_same_name_stays(tmp_path: Path) -> None:
    texts = Texts(tmp_path)
    names = [texts.take(piece(content))["name"] for content in (b"one", b"two", b"one", b"two")]
    assert names == ["story.txt", "story-2.txt", "story.txt", "story-2.txt"]
    assert (tmp_path / "story.txt").read_bytes() == b"one" and (tmp_path / "story-2.txt").read_bytes() == b"two"


def test_two_texts_of_one_name_arrive_at_once(tmp_path: Path) -> None:
    texts, ids = Texts(tmp_path), ("a" * 16, "b" * 16)
    for at in (0, 4):
        for content, upload in zip((b"one one ", b"two two "), ids, strict=True):
            found = texts.take(piece(content[at : at + 4], at=at, size=8, upload=upload))
    assert found["complete"] and texts.names() != []
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"one one ", b"two two "}
    with pytest.raises(ValidationError):
        piece(b"one", upload="../../secret")


def test_incomplete_texts_are_bounded_and_old_ones_removed(tmp_path: Path) -> None:
    texts = Texts(tmp_path)
    for i in range(MOST):
        texts.take(piece(b"one", size=9, upload=f"{i:016x}"))
    with refused(code="range", field="name"):
        texts.take(piece(b"one", size=9, upload="f" * 16))
    assert len(os.listdir(tmp_path)) == MOST and texts.names() == []
    for part in tmp_path.iterdir():
        os.utime(part, (0, 0))
    texts.take(piece(b"one", upload="f" * 16))
    assert os.listdir(tmp_path) == ["story.txt"]


def test_no_file_of_another_folder_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("x")
    texts = Texts(tmp_path / "texts")
    texts.take(piece(b"one"))
    (tmp_path / "texts" / "link.txt").symlink_to(tmp_path / "secret.txt")
    assert texts.names() == ["story.txt"]
    for name in ("../secret.txt", "link.txt", str(tmp_path / "secret.txt"), ".story.txt.part", "..", ""):
        assert texts.path(name) is None


def test_full_disk_is_a_sentence_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Texts(tmp_path / "texts")
    texts.take(piece(b"one"))
    real = Path.open

    def full(path: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        if path.suffix == ".part" and "r" not in mode:
            real(path, mode, *args, **more).close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, mode, *args, **more)

    monkeypatch.setattr(Path, "open", full)
    with failed(code="disk"):
        texts.take(piece(b"two"))
    assert os.listdir(tmp_path / "texts") == ["story.txt"]


def test_number_of_texts_is_bounded(tmp_path: Path) -> None:
    for i in range(MOST):
        (tmp_path / f"t{i}.txt").write_text("x")
    with refused(code="range", field="name"):
        Texts(tmp_path).take(piece(b"one"))
