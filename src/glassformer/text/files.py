"""Corpora from files: one file, a folder of files, or a stream that is saved first."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from os.path import isfile
from pathlib import Path
from typing import IO

from glassformer.errors import RequestError, WorkError
from glassformer.files import OF_CACHE, put, temporary_file
from glassformer.names.places import kind_of
from glassformer.text.documents import BETWEEN, Corpus, Document, mended

CHUNK = 256 * 1024  # bytes read at once
WHOLE = 4 * 1024 * 1024  # a document up to this number of bytes is held as one string; a larger one is streamed
LONGEST_LINE = 256 * 1024 * 1024  # of a JSONL file
STRAY_BYTES = 16  # and WRONG_SHARE of a file may be invalid UTF-8: a file with more has another encoding, or no text
WRONG_SHARE = 0.01
SEPARATOR = b"<|endoftext|>"
COLUMN = "text"
"""Default field of JSON lines that is read as text."""
JOIN = "+"
"""Separator, in the name of a column, between the fields that form a record."""
JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
_SUFFIXES = """
txt text md markdown rst adoc org tex bib html htm xml json csv tsv yaml yml toml ini cfg conf log srt
py pyi pyx ipynb js mjs ts jsx tsx c h cc cpp cxx hpp cu cuh m java kt kts scala go rs rb php pl pm lua
sh bash zsh fish ps1 sql r jl hs ml mli fs cs swift dart lisp clj scm el vim css scss sass cmake
"""
TEXT_SUFFIXES = JSONL_SUFFIXES | {f".{suffix}" for suffix in _SUFFIXES.split()}
"""Suffixes of the files of a folder that are read as text; a name without a suffix (README, wiki_00) is text too."""
ID_SUFFIXES = (".bin", ".npy")
"""Suffixes of files of token ids (`id_files.py`), which are not text."""
NAMED = 3
"""Most skipped files that the notes of a folder name."""


@dataclass(frozen=True)
class Scan:
    """Result of one pass over a file: its hash, its size in bytes, the offset of its first NUL byte (-1 without one),
    the start of its text after a byte-order mark, the offsets of its separators, and the number of bytes that are not
    UTF-8."""

    sha256: str
    size: int
    nul: int
    begin: int  # 3 after a UTF-8 byte-order mark, else 0
    separators: array[int]
    wrong: int

    @property
    def foreign(self) -> bool:
        """True if the file is in another encoding than UTF-8: too many bytes are invalid."""
        return self.wrong > max(STRAY_BYTES, WRONG_SHARE * self.size)


def scan_file(path: Path) -> Scan:
    """Returns the hash, sizes and offsets of a file (see `Scan`), which is read once, in chunks. Raises OSError."""
    sha = hashlib.sha256()
    separators = array("Q")
    size, nul, begin, right = 0, -1, 0, 0
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    tail = b""  # end of the previous chunk: a separator may cross the border
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            if size == 0 and chunk.startswith(codecs.BOM_UTF8):
                begin = len(codecs.BOM_UTF8)
            sha.update(chunk)
            right += len(decoder.decode(chunk).encode())
            if nul < 0 and (at := chunk.find(b"\0")) >= 0:
                nul = size + at
            window = tail + chunk
            at = window.find(SEPARATOR)
            while at >= 0:
                separators.append(size - len(tail) + at)
                at = window.find(SEPARATOR, at + len(SEPARATOR))
            # One byte less than a separator, so that no separator is found twice.
            tail = window[-(len(SEPARATOR) - 1) :]
            size += len(chunk)
    return Scan(sha.hexdigest(), size, nul, begin, separators, size - right)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that was readable when the corpus was opened. Raises WorkError if it no longer is."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - the `with` below must not catch what its block raises
    except OSError as problem:
        raise WorkError(
            f"{path} can no longer be read ({problem.strerror or problem}); leave the corpus in place while it is used",
            code="changed",
        ) from problem  # fmt: skip
    with file:
        yield file


def read_span(path: Path, begin: int, end: int) -> Iterator[str]:
    """Yields the text of a file from one byte offset to another, decoded from UTF-8 in chunks; U+FFFD replaces invalid
    bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with _opened(path) as file:
        file.seek(begin)
        left = end - begin
        while left > 0 and (data := file.read(min(CHUNK, left))):
            left -= len(data)
            yield decoder.decode(data)
        yield decoder.decode(b"", True)


def _spans(path: Path, scan: Scan, name: str) -> Iterator[Document]:
    """Yields the documents of a plain text file: the texts between its `<|endoftext|>` separators, or the whole of
    it."""
    if not scan.separators:
        yield _span(path, scan.begin, scan.size, name)
        return
    begin = scan.begin
    for index, end in enumerate(chain(scan.separators, [scan.size])):
        if end - begin > WHOLE:
            yield _span(path, begin, end, f"{name}#{index}")
        elif text := "".join(read_span(path, begin, end)).strip():
            yield Document(f"{name}#{index}", text)
        begin = end + len(SEPARATOR)


def _span(path: Path, begin: int, end: int, name: str) -> Document:
    if end - begin <= WHOLE:
        return Document(name, "".join(read_span(path, begin, end)))
    return Document(name, lambda: read_span(path, begin, end))


def _json_lines(path: Path, name: str, column: str) -> Iterator[Document]:
    """Yields a document for each line of a JSONL file: the line's field `column`; for NAME+NAME several fields, texts
    or numbers, with a tab between. Raises RequestError for a line without such a field."""
    columns = column.split(JOIN)
    kinds, what = (str, "string field") if len(columns) == 1 else ((str, int, float), "text or number as its field")
    with _opened(path) as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            where = f"line {number} of {path}"
            if len(line) > LONGEST_LINE:
                raise RequestError(
                    f"{where} is longer than {LONGEST_LINE >> 20} MiB; give long documents as text files",
                    code="range", field=f"{path.name}:{number}",
                )  # fmt: skip
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as problem:
                raise RequestError(
                    f"{where} is not JSON ({problem}); each line must be an object with a {column!r}",
                    code="syntax", field=f"{path.name}:{number}",
                ) from None  # fmt: skip
            given = record if isinstance(record, dict) else {}
            values = [given.get(field) for field in columns]
            lacking = next((i for i, value in enumerate(values) if not isinstance(value, kinds)), None)
            if lacking is not None:
                fields = ", ".join(map(repr, list(record)[:8])) if isinstance(record, dict) else type(record).__name__
                raise RequestError(
                    f"{where} has no {what} {columns[lacking]!r} (it has: {fields or 'nothing'}); name the field that "
                    f"is the text: --field NAME, or {path},column=NAME; NAME+NAME joins fields",
                    code="missing", field=f"{path.name}:{number}.{columns[lacking]}",
                )  # fmt: skip
            text = str(values[0]) if len(values) == 1 else BETWEEN.join(_fields(values))
            if text := mended(text):
                yield Document(f"{name}#{number}", text)


def _fields(values: Sequence[object]) -> list[str]:
    """Returns the fields of a record as texts without tabs, which separate them. In the first field a tab becomes a
    space, so that offsets are kept; white space around the others is removed, so that the separator is a token by
    itself."""
    first, *others = [str(value).replace(BETWEEN, " ") for value in values]
    return [first, *(other.strip() for other in others)]


def read_file(path: Path, scan: Scan, name: str, column: str = COLUMN) -> Iterator[Document]:
    """Yields the documents of one file: of JSON lines by its suffix, else of plain text."""
    if path.suffix.lower() in JSONL_SUFFIXES:
        yield from _json_lines(path, name, column)
    else:
        yield from _spans(path, scan, name)


def _format(path: Path, column: str) -> str:
    """Returns the part of a fingerprint that names the file's format, because equal bytes are other documents as JSON
    lines."""
    if path.suffix.lower() not in JSONL_SUFFIXES:
        return "text"
    return "jsonl" if column == COLUMN else f"jsonl {column}"


def open_file(path: Path, name: str | None = None, data: str | None = None, column: str = COLUMN) -> Corpus:
    """Opens a corpus of one file: JSON lines by suffix, else text, cut at `<|endoftext|>` if it contains that.

    `column` is the field of JSON lines that is read; for other files it must be the default. `data` is the name of the
    data in messages. Raises RequestError."""
    name, data = name or path.name, data or str(path)
    if column != COLUMN and path.suffix.lower() not in JSONL_SUFFIXES:
        raise RequestError(
            f"data={data!r}: column={column} is a field of JSON lines, and {path.name} is not a .jsonl file",
            code="conflict", field="data.column", value=column, expected="a .jsonl file",
        )  # fmt: skip
    if path.suffix.lower() in ID_SUFFIXES:
        raise RequestError(
            f"data={data!r} holds token ids, and a text is needed here; give a text file or a folder of them",
            code="type", field="data", value=data,
        )  # fmt: skip
    try:
        scan = scan_file(path)
    except OSError as problem:
        raise RequestError(
            f"data={data!r} cannot be read ({problem.strerror or problem})", code="disk", field="data", value=data
        ) from problem
    with open(path, "rb") as file:
        if kind := kind_of(file.read(16)):
            raise RequestError(
                f"data={data!r} is {kind}; give UTF-8 text, unpacked", code="type", field="data", value=data
            )
    if scan.nul >= 0:
        tabular = path.suffix.lower() in (".parquet", ".arrow")
        raise RequestError(
            f"data={data!r} is not text: it has a NUL byte at offset {scan.nul}; "
            + (f"pass hf:{path.parent} to read its tables" if tabular else "give UTF-8 text, unpacked"),
            code="type", field="data", value=data,
        )  # fmt: skip
    if scan.foreign:
        raise RequestError(
            f"data={data!r} is not UTF-8: {scan.wrong:,} of its {scan.size:,} bytes are not; "
            "give UTF-8 text, which `iconv -f CP1252 -t UTF-8` makes of a file in the encoding CP1252",
            code="damaged", field="data", value=scan.wrong,
        )  # fmt: skip
    fingerprint = hashlib.sha256(f"{_format(path, column)}:{scan.sha256}".encode()).hexdigest()
    notes = {"replaced_bytes": scan.wrong} if scan.wrong else {}
    corpus = Corpus(name, fingerprint, lambda: read_file(path, scan, name, column), scan.size, notes)
    return refuse_empty(corpus, f"data={data!r}")


def open_folder(folder: Path, column: str = COLUMN) -> Corpus:
    """Opens a corpus of the documents in all text files below `folder`, in sorted order, each file as in `open_file`;
    `column` is the field of JSON lines. Skipped files are counted in `notes`. Raises RequestError."""
    skipped: Counter[str] = Counter()
    named: list[str] = []
    files: list[tuple[Path, Scan, str]] = []
    sha = hashlib.sha256(b"folder")

    def unlisted(problem: OSError) -> None:
        if problem.filename == str(folder):
            raise RequestError(
                f"data={str(folder)!r} cannot be read ({problem.strerror or problem})",
                code="disk", field="data", value=str(folder),
            ) from problem  # fmt: skip
        skipped["unreadable folders"] += 1

    for path in _walk(folder, unlisted):
        within = path.relative_to(folder).as_posix()
        if path.suffix and path.suffix.lower() not in TEXT_SUFFIXES:
            skipped["token ids" if path.suffix.lower() in ID_SUFFIXES else "other suffixes"] += 1
            named.append(within)
            continue
        try:
            # A pipe or a device in the folder would block or never end.
            if not path.is_file():
                raise OSError("not a regular file")
            scan = scan_file(path)
        except OSError:
            skipped["unreadable"] += 1
            named.append(within)
            continue
        if scan.nul >= 0 or scan.size == scan.begin or scan.foreign:
            skipped["binary" if scan.nul >= 0 else "empty" if scan.size == scan.begin else "not UTF-8"] += 1
            named.append(within)
        else:
            files.append((path, scan, within))
            sha.update(f"{_format(path, column)}:{scan.sha256}".encode())

    def documents() -> Iterator[Document]:
        for path, scan, name in files:
            yield from read_file(path, scan, name, column)

    notes: dict[str, object] = {"files": len(files), "skipped": dict(sorted(skipped.items()))}
    if named:
        notes["skipped_files"] = named[:NAMED]
    if wrong := sum(scan.wrong for _, scan, _ in files):
        notes["replaced_bytes"] = wrong
    size = sum(scan.size for _, scan, _ in files)
    corpus = Corpus(folder.resolve().name, sha.hexdigest(), documents, size, notes)
    why = ""
    if skipped:
        why = "; files skipped: " + ", ".join(f"{count} {kind}" for kind, count in sorted(skipped.items()))
        why += f" ({', '.join(named[:NAMED])})" if named else ""
        why += f"; tables are read by hf:{folder}" if skipped["other suffixes"] else ""
    return refuse_empty(corpus, f"data={str(folder)!r}", why)


def is_saved(folder: Path) -> bool:
    """Returns True for a folder that `save_to_disk` of the package `datasets` wrote."""
    there = {name for name in ("dataset_dict.json", "state.json", "dataset_info.json") if isfile(folder / name)}
    return "dataset_dict.json" in there or len(there) > 1


def has_text(folder: Path) -> bool:
    """Returns True if a folder holds a file that `open_folder` may read as text."""
    files = _walk(folder, lambda problem: None)
    return any(not path.suffix or path.suffix.lower() in TEXT_SUFFIXES for path in files)


def _walk(folder: Path, unlisted: Callable[[OSError], None]) -> Iterator[Path]:
    """Yields the files below `folder` in an order independent of the file system, without hidden files and folders.

    Links to folders are followed, and no folder is read twice, so that a loop of links ends. `unlisted` is called with
    the error of each unreadable folder.
    """
    seen: set[tuple[int, int]] = set()
    for root, folders, names in os.walk(folder, onerror=unlisted, followlinks=True):
        about = os.stat(root)
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(root, name)


def refuse_empty(corpus: Corpus, what: str, why: str = "") -> Corpus:
    """Returns `corpus`. Raises RequestError if it has no text; `what` and `why` become part of the message."""
    for document in corpus.documents():
        for piece in document.pieces():
            if piece.strip():
                return corpus
    raise RequestError(
        f"{what} holds no text{why}; give a UTF-8 text file, a folder of them, or an embedded corpus",
        code="missing", field="data",
    )  # fmt: skip


def spool(stream: IO[bytes], name: str, data: str, cache: Path) -> Corpus:
    """Saves a stream, which can be read only once, in the cache, and returns the corpus of that file."""
    folder = cache / "streams"
    sha = hashlib.sha256()
    with temporary_file(folder / "stream", advice=OF_CACHE) as temporary:
        with open(temporary, "wb") as file:
            while chunk := stream.read(CHUNK):
                sha.update(chunk)
                file.write(chunk)
        kept = folder / f"{sha.hexdigest()[:32]}{'.jsonl' if _begins_as_json_lines(temporary) else '.txt'}"
        put(temporary, kept)
    return open_file(kept, name, data)


def _begins_as_json_lines(path: Path) -> bool:
    """Returns True if the file's first line is a JSON object with a string `text`, because a stream has no suffix."""
    with open(path, "rb") as file:
        line = file.readline(LONGEST_LINE).removeprefix(codecs.BOM_UTF8)
    if not line.startswith(b"{"):
        return False
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and isinstance(record.get("text"), str)
