"""Reader of a file that grows, which reads each line once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

Row = TypeVar("Row")
MOST_ROWS = 20_000
"""Largest number of rows that are kept; of a longer file every second row is, then every fourth."""
LINE = 1 << 22
"""Largest number of bytes of a line; a longer line is left out."""


class Tail(Generic[Row]):
    """Reader of a file that another process writes line by line. A file that was replaced or cut is read again."""

    def __init__(self, path: Path, row_of: Callable[[bytes], Row | None]) -> None:
        self.path, self._row_of = path, row_of
        self._forget()

    def _forget(self) -> None:
        self._rows: list[Row] = []
        self._at, self._file, self._seen, self._every = 0, 0, 0, 1
        self.last: Row | None = None
        """Latest row, whether or not it is kept."""

    def rows(self) -> list[Row]:
        """Returns the rows so far, without a last line that is not complete; none for a file that cannot be read."""
        try:
            with self.path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._file or facts.st_size < self._at:
                    self._forget()
                    self._file = facts.st_ino
                file.seek(self._at)
                while (line := file.readline(LINE)).endswith(b"\n"):
                    self._at += len(line)
                    self._take(line)
                if len(line) == LINE:  # no row is that long
                    self._at += len(line)
        except OSError:
            self._forget()
        return self._rows

    def _take(self, line: bytes) -> None:
        row = self._row_of(line)
        if row is None:
            return
        self.last = row
        if self._seen % self._every == 0:
            self._rows.append(row)
        self._seen += 1
        if len(self._rows) > MOST_ROWS:
            del self._rows[1::2]
            self._every *= 2
