"""Tokenised text on disk: a flat file of ids that is mapped into memory, never loaded.

A folder of the cache holds
    tokens.bin      ids, little-endian uint16 (vocabulary up to 65536) or uint32
    documents.bin   little-endian uint64: the index of the first token of each document
    shards.json     counts, dtype, fingerprints and the hashes of the two files; written last, and checked
                    against them whenever they are opened
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.errors import RequestError, WorkError
from glassformer.files import SCHEMAS, atomic_folder, cache_folder
from glassformer.progress import OnProgress, silent
from glassformer.text.documents import PIECE, Document
from glassformer.text.storage import digest
from glassformer.text.vocabulary import Tokenizer

VERSION = 1  # part of the folders' names, and so of the text of existing runs
FORMAT = SCHEMAS["shards"]
BATCH = 4 * PIECE  # characters encoded by one call; with the library's bookkeeping some 100 MB
LARGEST_SIDECAR = 1 << 20
CHUNK = 1 << 22  # ids that are read at once
SAMPLE = 1 << 16  # tokens at each end whose ids are compared with the vocabulary
CHECKED = (16, 4096)  # (texts of each batch that are decoded again, characters of each)
LOST = 0.001  # of the characters that may not be recovered: a normaliser that merges accents is not a loss
DROPPED = 0.05  # of the bytes that no token may cover: the count is exact only for byte-level BPE
DTYPES = {"uint16": "<u2", "uint32": "<u4"}


@dataclass(frozen=True, eq=False)
class TokenShards:
    """The tokens of one side of a corpus, in the order of its documents."""

    tokens: np.ndarray  # (n,) uint16 or uint32, mapped from the disk
    document_starts: np.ndarray  # (documents,) uint64
    info: dict[str, Any]
    folder: Path

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def documents(self) -> int:
        return len(self.document_starts)

    @property
    def bytes(self) -> int:
        """Number of UTF-8 bytes of the text of these tokens."""
        return int(self.info["bytes"])

    @property
    def lost(self) -> str | None:
        """Phrase on the part of the text that the tokens lose, so that bits per byte would be wrong; None without
        loss."""
        return self.info.get("lost")

    @property
    def task(self) -> str | None:
        """Name of the task whose rows these tokens are (`tasks.py`); None for a text."""
        notes = self.info.get("notes")
        task = notes.get("task") if isinstance(notes, dict) else None
        return task if isinstance(task, str) else None

    def token_bytes(self, tokenizer: Tokenizer) -> np.ndarray:
        """Returns the number of UTF-8 bytes of each token of `tokenizer`, which made these tokens, (v,) int64; zeros if
        the tokens lose part of the text."""
        return tokenizer.token_bytes() * (self.lost is None)

    @classmethod
    def open(cls, folder: str | Path) -> TokenShards:
        """Returns the tokens in a folder of shards, mapped into memory. Raises RequestError if its content was changed,
        or if sizes, types or ids contradict each other.

        Each file is read once for its hash, a second or two per GB, as the text is for its fingerprint.
        """
        folder = Path(folder)
        info = _sidecar(folder)
        tokens = _mapped(folder / "tokens.bin", DTYPES[info["dtype"]], info["tokens"], info["sha256"])
        starts = _mapped(folder / "documents.bin", "<u8", info["documents"], info["sha256"])
        if starts[0] != 0 or int(starts[-1]) >= len(tokens) or (np.diff(starts.astype(np.int64)) <= 0).any():
            raise RequestError(
                f"{folder}/documents.bin: the beginnings of documents are not in order",
                code="damaged", field="documents.bin",
            )  # fmt: skip
        largest = max(int(tokens[:SAMPLE].max()), int(tokens[-SAMPLE:].max()))
        if largest >= info["vocab_size"]:
            raise RequestError(
                f"{folder}/tokens.bin holds the id {largest}, outside the vocabulary of {info['vocab_size']}",
                code="range", field="tokens.bin", value=largest,
            )  # fmt: skip
        return cls(tokens, starts, info, folder)


def _sidecar(folder: Path) -> dict[str, Any]:
    path = folder / "shards.json"
    try:
        if path.stat().st_size > LARGEST_SIDECAR:
            raise RequestError(
                f"{path} is larger than a description of shards can be", code="range", field="shards.json"
            )
        info = json.loads(path.read_bytes())
    except OSError as problem:
        raise RequestError(
            f"{path} cannot be read ({problem.strerror or problem})", code="missing", field="shards.json"
        ) from problem
    except (ValueError, RecursionError) as problem:
        raise RequestError(f"{path} is not JSON ({problem})", code="syntax", field="shards.json") from None
    if not isinstance(info, dict) or info.get("glassformer_shards") != FORMAT:
        raise RequestError(
            f"{path} does not describe token shards of version {FORMAT}", code="schema", field="shards.json"
        )
    counts = ("tokens", "documents", "bytes", "vocab_size")
    if info.get("dtype") not in DTYPES or not all(type(info.get(key)) is int and info[key] >= 0 for key in counts):
        raise RequestError(
            f"{path} lacks a dtype or one of the counts {', '.join(counts)}", code="missing", field="shards.json:dtype"
        )
    if not isinstance(info.get("sha256"), dict):
        raise RequestError(f"{path} lacks the hashes of the two files", code="missing", field="shards.json:sha256")
    return info


def _mapped(path: Path, dtype: str, count: int, hashes: dict[str, Any]) -> np.ndarray:
    """Returns `count` numbers of `dtype`, mapped from the file `path`. Raises RequestError if its length differs, or
    its hash from that in `hashes`."""
    expected = count * np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
        if size != expected or not count:
            raise RequestError(
                f"{path} has {size} bytes where {count} numbers of type {dtype} take {expected}",
                code="damaged", field=path.name, value=size,
            )  # fmt: skip
        with open(path, "rb") as file:  # read, not mapped: mapped pages count as memory of the process
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise RequestError(
            f"{path} cannot be read ({problem.strerror or problem})", code="missing", field=path.name
        ) from problem
    if found != hashes.get(path.name):
        raise RequestError(
            f"{path} is not as it was written: its hash is not the one in shards.json", code="changed", field=path.name
        )
    return np.memmap(path, dtype=dtype, mode="r")


def token_shards(
    documents: Callable[[], Iterable[Document]],
    tokenizer: Tokenizer,
    fingerprint: str,
    *,
    notes: Callable[[], dict[str, object]] = dict,
    total_bytes: Callable[[], int | None] = lambda: None,
    cache_dir: str | Path | None = None,
    stage: str = "tokenizing",
    progress: OnProgress | None = None,
) -> TokenShards:
    """Returns the tokens of a stream of documents: mapped from the cache, or written there first.

    `fingerprint` names the stream; together with the tokenizer's it names the folder. `notes()` and `total_bytes()`
    (the length, for `progress`) are called only if shards are written. Memory does not grow with the text. A damaged
    folder of the cache is rewritten, with a warning. Raises RequestError if the documents hold no token.
    """

    def write(folder: Path) -> None:
        info = {"corpus": fingerprint, "tokenizer": tokenizer.fingerprint(), "notes": notes()}
        _write(folder, documents(), tokenizer, info, total_bytes(), stage, progress or silent)

    return _kept(cache_folder(cache_dir) / "shards" / digest(VERSION, fingerprint, tokenizer.fingerprint()), write)


def id_shards(ids: np.ndarray, tokenizer: Tokenizer, cache_dir: str | Path | None = None) -> TokenShards:
    """Returns the tokens of one document, ids (n,) that `tokenizer` has made: mapped from the cache, or written there
    first, in chunks, so that memory does not grow with the ids. Raises RequestError for an id outside the
    vocabulary."""
    name, token_bytes = _dtype(tokenizer), tokenizer.token_bytes()
    starts = np.zeros(1, "<u8").tobytes()
    size, found = 0, hashlib.sha256()

    def pieces() -> Iterator[np.ndarray]:
        return (np.asarray(ids[start : start + CHUNK]) for start in range(0, len(ids), CHUNK))

    for piece in pieces():
        if not 0 <= piece.min() <= piece.max() < tokenizer.vocab_size:
            wrong = int(piece.min() if piece.min() < 0 else piece.max())
            raise RequestError(
                f"data holds the token id {wrong}, outside the vocabulary of {tokenizer.vocab_size}",
                code="range", field="data", value=wrong, expected=f"0 to {tokenizer.vocab_size - 1}",
            )  # fmt: skip
        size += int(token_bytes[piece].sum())
        found.update(piece.astype(DTYPES[name]).tobytes())
    hashes = {"tokens.bin": found.hexdigest(), "documents.bin": hashlib.sha256(starts).hexdigest()}

    def write(folder: Path) -> None:
        with open(folder / "tokens.bin", "wb") as tokens_file, open(folder / "documents.bin", "wb") as starts_file:
            for piece in pieces():
                tokens_file.write(piece.astype(DTYPES[name]).tobytes())
            starts_file.write(starts)
            for file in (tokens_file, starts_file):
                file.flush()
                os.fsync(file.fileno())
        lost = None if size else "ids without a text"
        info = {"corpus": hashes["tokens.bin"], "tokenizer": tokenizer.fingerprint(), "notes": {}}
        _describe(folder, name, (len(ids), 1, size), tokenizer, lost, hashes, info)

    folder = digest(VERSION, "ids", hashes["tokens.bin"], tokenizer.fingerprint())
    return _kept(cache_folder(cache_dir) / "shards" / folder, write)


def _kept(folder: Path, write: Callable[[Path], None]) -> TokenShards:
    """Returns the tokens in a folder of the cache, which `write(folder)` fills if it is missing or damaged. Raises
    WorkError if they cannot be read back."""
    if folder.exists():
        try:
            return TokenShards.open(folder)
        except RequestError as problem:
            warnings.warn(f"the cached tokens are damaged, or of an earlier version, and are written again ({problem})")
            shutil.rmtree(folder, ignore_errors=True)
    with atomic_folder(folder) as temporary:
        write(temporary)
    try:
        return TokenShards.open(folder)
    except RequestError as problem:
        raise WorkError(
            f"the tokens just written cannot be read back ({problem}); check the disk of {folder}",
            code="disk",
        ) from None  # fmt: skip


def _write(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    info: dict[str, Any],
    total: int | None,
    stage: str,
    progress: OnProgress,
) -> None:
    name = _dtype(tokenizer)
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    tokens = count = size = 0
    ids_hash, starts_hash = hashlib.sha256(), hashlib.sha256()
    token_bytes, kept = tokenizer.token_bytes(), _Coverage()
    begins = True
    with open(folder / "tokens.bin", "wb") as ids_file, open(folder / "documents.bin", "wb") as starts_file:
        for batch in _batched(documents):
            starts = array("Q")
            kept.check(tokenizer, [text for text, _ in batch])
            for (text, ends), ids in zip(batch, tokenizer.encode_batch([text for text, _ in batch]), strict=True):
                # A piece may encode to nothing (a normaliser that strips); the document then starts with its next one.
                written = np.concatenate([ids, end]) if ends and (len(ids) or not begins) else ids
                if len(written) and begins:
                    starts.append(tokens)
                    begins = False
                # write(), not tofile(): the latter hides that the disk is full
                data = np.asarray(written).astype(DTYPES[name]).tobytes()
                ids_hash.update(data)
                ids_file.write(data)
                tokens += len(written)
                size += len(text.encode())
                kept.bytes += int(token_bytes[ids].sum())
                begins = begins or ends
            data = np.asarray(starts, "<u8").tobytes()
            starts_hash.update(data)
            starts_file.write(data)
            count += len(starts)
            progress(stage, size, total)
        for file in (ids_file, starts_file):
            file.flush()
            os.fsync(file.fileno())
    if not tokens:
        raise RequestError("the data has no text to tokenize", code="missing", field="data")
    hashes = {"tokens.bin": ids_hash.hexdigest(), "documents.bin": starts_hash.hexdigest()}
    _describe(folder, name, (tokens, count, size), tokenizer, kept.loss(size), hashes, info)


def _dtype(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


def _describe(
    folder: Path,
    dtype: str,
    counts: tuple[int, int, int],
    tokenizer: Tokenizer,
    lost: str | None,
    hashes: dict[str, str],
    info: dict[str, Any],
) -> None:
    """Writes the folder's shards.json; `counts` are the numbers of tokens, documents and bytes."""
    tokens, documents, size = counts
    described = {
        "dtype": dtype, "tokens": tokens, "documents": documents, "bytes": size, "vocab_size": tokenizer.vocab_size,
        "lost": lost, "sha256": hashes,
    }  # fmt: skip
    (folder / "shards.json").write_text(json.dumps({"glassformer_shards": FORMAT, **described, **info}))


@dataclass
class _Coverage:
    """Counter of the characters of a text that are lost in its tokens, after which bits per byte are not meaningful."""

    read: int = 0  # characters that were decoded again, without spaces, which `bytes` counts
    lost: int = 0
    bytes: int = 0  # of the text of the tokens

    def check(self, tokenizer: Tokenizer, texts: list[str]) -> None:
        many, long = CHECKED
        for text in texts[:: max(1, len(texts) // many)]:
            there = Counter("".join(text[:long].split()))
            back = Counter(tokenizer.decode(tokenizer.encode(text[:long])))
            self.read += there.total()
            self.lost += (there - back).total()

    def loss(self, size: int) -> str | None:
        """Returns a phrase about the loss in a text of `size` bytes; None if it is negligible."""
        if self.lost > LOST * self.read:
            return f"of {self.read:,} characters {self.lost:,} do not come back"
        elif self.bytes < (1 - DROPPED) * size:
            return f"its tokens cover {self.bytes:,} of {size:,} bytes"
        return None


def _batched(documents: Iterable[Document]) -> Iterator[list[tuple[str, bool]]]:
    """Yields batches of pieces of documents, lists of (text, True if its document ends there), each of about BATCH
    characters."""
    batch: list[tuple[str, bool]] = []
    length = 0
    for document in documents:
        waiting: str | None = None  # a piece is passed on once it is known whether another follows
        for piece in document.pieces():
            if waiting is not None:
                batch.append((waiting, False))
            waiting = piece
            length += len(piece)
            if length >= BATCH and batch:
                yield batch
                batch, length = [], len(piece)
        if waiting is not None:
            batch.append((waiting, True))
        if length >= BATCH:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch
