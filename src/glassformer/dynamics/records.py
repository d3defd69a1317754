"""dynamics.jsonl: records of a watch, one JSON object a line.

    {"step": 50, "statistics": {STATISTIC: {WHERE: number, or [one per head]}}}
    {"step": 61, "event": "spike", "what": "loss", "value": 9.1, "sigmas": 8.2, "batch": [text, ...], ...}

Numbers have six significant figures; values that are not finite are the strings "nan", "inf" or "-inf".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from glassformer.errors import RequestError
from glassformer.files import atomic_file, disk_errors

NAME = "dynamics.jsonl"
MOST_BYTES = 1 << 27
"""Maximum bytes that are read of a file: its last ones, because a failure is recorded at the end."""
LINE_BYTES = 1 << 22
WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
MOST_HEADS, MOST_SERIES = 1 << 14, 1 << 16
MOST_TEXTS, LONGEST_TEXT, LONGEST_NAME = 16, 2000, 400
LAST_STEP = 1 << 53


class Records:
    """Writer of rows to RUN/dynamics.jsonl. The file is created with its first row. Raises WorkError if writing
    fails."""

    def __init__(self, path: Path):
        self.path = path
        self.file: IO[str] | None = None

    @classmethod
    def open(cls, folder: Path, resume_step: int) -> Records:
        """Returns the writer of a resumed run, after removing from its file all invalid lines and the rows of steps
        after `resume_step`, the step of the checkpoint."""
        records = cls(folder / NAME)
        path = records.path
        if path.exists():
            with atomic_file(path) as temporary, path.open("rb") as old, temporary.open("wb") as new:
                new.writelines(line for line, row in _lines(old) if row and row["step"] <= resume_step)
        return records

    def write(self, row: dict[str, Any]) -> None:
        with disk_errors(self.path):
            if self.file is None:
                self.file = self.path.open("a", encoding="utf-8")
            self.file.write(json.dumps(plain(row), allow_nan=False) + "\n")
            self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            with disk_errors(self.path):
                self.file.close()
            self.file = None


class Unwritten(Records):
    """Writer that discards its rows, for ranks other than the first."""

    def write(self, row: dict[str, Any]) -> None:
        pass


class Recorded(list[dict[str, Any]]):
    """Rows of a file, in order, with counts of the lines and bytes that were left out."""

    skipped: int = 0
    """Number of invalid lines, including one cut by a crash."""
    left_out: int = 0
    """Bytes left out at the start of a file larger than MOST_BYTES."""


def read_records(path: Path, most_bytes: int = MOST_BYTES) -> Recorded:
    """Returns the rows of a dynamics.jsonl, checked: step a count, statistics {name: {place: float or [float, ...]}},
    an event with known fields only; "nan", "inf" and "-inf" are converted to floats, long texts are cut.

    A missing file has no rows: the run was not watched. Invalid lines are skipped and counted. Raises RequestError if
    the file cannot be read, has several lines and no valid one, or names too many series."""
    rows, series = Recorded(), set[tuple[str, str]]()
    try:
        with path.open("rb") as file:
            rows.left_out = max(0, os.fstat(file.fileno()).st_size - most_bytes)
            file.seek(rows.left_out)
            if rows.left_out:
                file.readline(LINE_BYTES)
            for _, row in _lines(file):
                if row is None:
                    rows.skipped += 1
                    continue
                rows.append(row)
                series.update((name, where) for name, places in row.get("statistics", {}).items() for where in places)
                if len(series) > MOST_SERIES:
                    raise RequestError(
                        f"{path} names more than {MOST_SERIES:,} statistics at their places, more than any model has",
                        code="range", field=path.name,
                    )  # fmt: skip
    except FileNotFoundError:
        return rows
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}", code="disk", field=path.name) from None
    if rows.skipped > 1 and not rows:
        raise RequestError(
            f"{path} holds no statistics: none of its {rows.skipped} lines is a row", code="damaged", field=path.name
        )
    return rows


def plain(value: Any) -> Any:
    """Returns a tree of dicts and lists as JSON can hold it: floats to six significant figures, the strings "nan",
    "inf" and "-inf" for floats that are not finite."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def _lines(file: IO[bytes]) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields (line, checked row) of every line, with None as the row of an invalid line; lines that are too long come
    in parts, each invalid."""
    whole = True
    while line := file.readline(LINE_BYTES):
        ended = line.endswith(b"\n")
        yield line, record_of(line) if whole and ended else None
        whole = ended


def record_of(line: bytes) -> dict[str, Any] | None:
    """Returns the checked row of a line of dynamics.jsonl, or None for an invalid line."""
    try:
        return _checked(json.loads(line))
    except (ValueError, RecursionError):  # also invalid UTF-8, and integers of thousands of digits
        return None


def _checked(found: Any) -> dict[str, Any]:
    """Returns the row with only known fields. Raises ValueError for a value that no watch writes."""
    found = _is(found, dict)
    step, row = _is(found.get("step"), int), {"step": found.get("step")}
    if not 0 <= step < LAST_STEP or not found.keys() & {"statistics", "event"}:
        raise ValueError("no row")
    if "statistics" in found:
        row["statistics"] = {
            _name(statistic): {_name(where): _values(value) for where, value in _is(places, dict).items()}
            for statistic, places in _is(found["statistics"], dict).items()
        }
    if "event" in found:
        row["event"] = _name(found["event"])
        row |= {key: read(found[key]) for key, read in FIELDS.items() if found.get(key) is not None}
    return row


def _is(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{type(value).__name__} in place of {kind.__name__}")
    return value


def _text(value: Any) -> str:
    """Returns a text cut to LONGEST_TEXT characters, with lone surrogates, which cannot be printed, replaced. Raises
    ValueError for another type."""
    return _is(value, str)[:LONGEST_TEXT].encode("utf-8", "replace").decode()


def _name(value: Any) -> str:
    if len(_is(value, str)) > LONGEST_NAME:
        raise ValueError("a name too long")
    return _text(value)


def number(value: Any) -> float:
    """Returns a recorded number as a float, also one that is written as "nan", "inf" or "-inf". Raises ValueError for
    anything else."""
    if type(value) is str and value in WORDS:
        return WORDS[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("no number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a number too large") from None


def _values(value: Any) -> float | list[float]:
    return [number(one) for one in value[:MOST_HEADS]] if type(value) is list else number(value)


FIELDS = {
    "what": _name,
    "site": _name,
    "value": number,
    "sigmas": number,
    "to": lambda value: _is(value, int),
    "from": lambda value: _is(value, int),
    "why": _text,
    "finite_in_float32": lambda value: _is(value, bool),
    "batch": lambda value: [_text(text) for text in _is(value, list)[:MOST_TEXTS]],
    "batch_losses": lambda value: [number(loss) for loss in _is(value, list)[:MOST_TEXTS]],
}
"""Known fields of an event, each with the function that checks and converts its value."""
