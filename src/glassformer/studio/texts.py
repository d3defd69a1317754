"""Texts that were dropped onto the page, kept in the studio's folder under plain names."""

from __future__ import annotations

import base64
import binascii
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

from glassformer.errors import RequestError, shown
from glassformer.figures.terminal import size as bytes_of
from glassformer.files import disk_errors, put
from glassformer.studio.bodies import TextPieceRequest
from glassformer.text.files import open_file

LARGEST = 64 << 20
"""Largest number of bytes of a text."""
PIECE = 4 << 20
"""Largest number of bytes of a text in one request."""
MOST = 100
"""Largest number of texts, with the incomplete ones."""
STALE_SECONDS = 3600
"""Age at which an incomplete text is removed: the page that sent it was closed."""
NOTHING_KEPT = "nothing of this text is kept"
NAME = re.compile(r"[^\W_][\w.@ -]{0,79}\.txt")
"""Pattern of the name of a text, which cannot be a path and ends in .txt."""


class Texts:
    """Folder of texts. A text arrives in pieces, also several at once, and is listed once it is complete and the
    library can read it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writing = threading.Lock()

    def names(self) -> list[str]:
        """Returns the names of the complete texts, the latest first."""
        found: list[tuple[float, str]] = []
        with suppress(OSError):
            found += [
                (one.stat().st_mtime, one.name)
                for one in self.folder.iterdir()
                if NAME.fullmatch(one.name) and not one.is_symlink() and one.is_file()
            ]
        return [name for _, name in sorted(found, reverse=True)]

    def path(self, name: str) -> Path | None:
        """Returns the file of a text; None for any other name."""
        return self.folder / name if name in self.names() else None

    def take(self, given: TextPieceRequest) -> dict[str, object]:
        """Writes a piece of a text, and with the last one keeps the text; returns its name and the bytes so far.

        Raises RequestError for a text that is too large, for a file that is not text, and for pieces out of order;
        WorkError for a full disk. What was written is then removed."""
        check_size(given.size)
        name = plain_name(given.name)
        with self._writing:
            part = self.folder / f".{given.upload}.part"
            try:
                have = self._append(part, given)
                if have < given.size:
                    return {"name": name, "have": have, "complete": False}
                open_file(part, data=name)  # refuses what is not text
                final = self._free(name, part)
                with disk_errors(final, NOTHING_KEPT):
                    put(part, final)
                return {"name": final.name, "have": have, "complete": True}
            except BaseException:
                with suppress(OSError):
                    part.unlink(missing_ok=True)
                raise

    def _append(self, part: Path, given: TextPieceRequest) -> int:
        try:
            piece = base64.b64decode(given.content, validate=True)
        except (binascii.Error, ValueError):
            raise RequestError("the piece is not base64", code="syntax", field="content") from None
        if given.at == 0 and len(self.names()) + self._incomplete() >= MOST:
            raise RequestError(
                f"{self.folder} holds {MOST} texts already; remove one", code="range", field="name", value=MOST
            )
        with disk_errors(self.folder, NOTHING_KEPT):
            self.folder.mkdir(parents=True, exist_ok=True)
            have = part.stat().st_size if given.at and part.is_file() else 0
            if have != given.at or have + len(piece) > given.size or not piece:
                raise RequestError(
                    "the pieces of the text came in another order; drop the file again",
                    code="conflict", field="at", value=given.at, expected=str(have),
                )  # fmt: skip
            with part.open("ab" if given.at else "wb") as file:
                file.write(piece)
        return have + len(piece)

    def _incomplete(self) -> int:
        """Returns the number of texts that are arriving; removes those of pages that were closed."""
        count = 0
        with suppress(OSError):
            for part in self.folder.glob(".*.part"):
                if time.time() - part.lstat().st_mtime > STALE_SECONDS:
                    part.unlink(missing_ok=True)
                else:
                    count += 1
        return count

    def _free(self, name: str, part: Path) -> Path:
        """Returns the file for a new text: an old text of the same name stays, unless it is the same."""
        stem, number = name.removesuffix(".txt"), 1
        while (place := self.folder / name).exists():
            if place.stat().st_size == part.stat().st_size and place.read_bytes() == part.read_bytes():
                break
            number += 1
            name = f"{stem}-{number}.txt"
        return place


def check_size(size: int) -> None:
    """Raises RequestError for a text that is empty or too large."""
    if not size:
        raise RequestError("the file is empty", code="missing", field="size", value=0, expected="a text")
    if size > LARGEST:
        raise RequestError(
            f"the file has {bytes_of(size)}, and the studio takes texts of at most {bytes_of(LARGEST)}; glassformer "
            "compare MODEL --data FILE reads a larger one in its place",
            code="range", field="size", value=size, expected=f"at most {LARGEST:,} bytes",
        )  # fmt: skip


def plain_name(name: str) -> str:
    """Returns the name of a file as a name of a text. Raises RequestError if no letter is left."""
    stem = re.sub(r"[^\w.@ -]+", "-", name.removesuffix(".txt")).strip("-_. @")[:64].strip("-_. @")
    found = f"{stem}.txt"
    while len(found.encode()) > 200:
        stem = stem[:-1]
        found = f"{stem}.txt"
    if NAME.fullmatch(found) is None:
        raise RequestError(f"{shown(repr(name))} cannot be the name of a text", code="syntax", field="name", value=name)
    return found
