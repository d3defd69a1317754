"""Reader of a file that grows, which reads each line once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

Row = TypeVar("Row")
MOST_ROWS = 20_000
"""Largest number of rows that are kept; of a longer file every second row is, then every fourth."""
LINE = 1 << 22
"""Largest number of bytes of a line; a longer line is left out."""
KNOWN = 256
"""Largest number of bytes before the next line that are compared, to recognise a file."""


class Tail(Generic[Row]):
    """Reader of a file that another process writes line by line, for several threads. A file that was replaced or cut
    is read again, also if it has grown since."""

    def __init__(self, path: Path, row_of: Callable[[bytes], Row | None]) -> None:
        self.path, self._row_of = path, row_of
        self._reading = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._rows: list[Row] = []
        self._at, self._before, self._file, self._seen, self._every = 0, b"", 0, 0, 1
        self.last: Row | None = None
        """Latest row, whether or not it is kept."""

    def rows(self) -> list[Row]:
        """Returns the rows so far, without a last line that is not complete; none for a file that cannot be read."""
        with self._reading:
            try:
                with self.path.open("rb") as file:
                    self._read(file)
            except OSError:
                self._forget()
            return list(self._rows)

    def _read(self, file: BinaryIO) -> None:
        file.seek(self._at - len(self._before))
        number = os.fstat(file.fileno()).st_ino
        if number != self._file or file.read(len(self._before)) != self._before:
            self._forget()
            self._file = number
            file.seek(0)
        while (line := file.readline(LINE)).endswith(b"\n"):
            self._passed(line)
            self._take(line)
        if len(line) == LINE:  # no row is that long
            self._passed(line)

    def _passed(self, line: bytes) -> None:
        self._at += len(line)
        self._before = line[-KNOWN:]

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
