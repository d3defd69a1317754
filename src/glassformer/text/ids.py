"""Token ids that a caller already has, as training data, and the one reader of data for every verb."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.errors import RequestError, shown
from glassformer.progress import OnProgress
from glassformer.text.batches import refuse_long
from glassformer.text.data import Tokens, prepare
from glassformer.text.id_files import open_ids
from glassformer.text.plain import IdTokenizer
from glassformer.text.shards import CHUNK, id_shards
from glassformer.text.tokenizers import Tokenizer, load_tokenizer, make_tokenizer, parse_spec

TokenIds = Iterable[Any]
"""Token ids as a caller may give them: an array, a tensor, a list or an iterator of ids, or of arrays of ids in
order."""

DataLike = str | Path | Tokens | TokenIds
"""Training data: a name or path (`open_corpus`, `open_ids`), tokens, or token ids."""


@dataclass(frozen=True, eq=False)
class IdData(Tokens):
    """Tokens given as ids, of a file, a dataset or an array, divided into training and held-out tokens."""

    source: str = "token ids"
    tokenizer_rule: str = "given"
    found: tuple[str, ...] = ()
    """Sentences for the user about unread files of the same folder."""

    @property
    def name(self) -> str:
        return self.source

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about unread files, and about results that ids without a text cannot have."""
        unknown = ["Token ids without a text: losses are per token, without bits per byte."]
        return [*self.found, *(unknown if self.validation.lost else [])]


def read_data(
    data: DataLike,
    tokenizer: str | Tokenizer = "auto",
    context: int | None = None,
    progress: OnProgress | None = None,
) -> Tokens:
    """Returns the tokens of `data` in any form that a verb takes: a name, a path, tokens or ids. Raises
    RequestError."""
    if isinstance(data, Tokens):
        return data
    if not isinstance(data, str | Path):
        return prepare_ids(data, tokenizer, context=context)
    ids = open_ids(str(data))
    if ids is None:
        return prepare(data, tokenizer, context=context, progress=progress)
    if tokenizer == "auto" and ids.tokenizer is not None:
        tokenizer = str(ids.tokenizer)
    return prepare_ids(ids.train, tokenizer, context=context, validation=ids.validation, name=ids.name, found=ids.notes)


def named_or_read(data: DataLike | None, tokenizer: str | Tokenizer | None = None) -> tuple[str | None, Tokens | None]:
    """Returns (name of the data, None) for a name or path, (None, tokens of the data) for data in memory, and
    (None, None) for None. Raises RequestError."""
    if data is None or isinstance(data, str | Path):
        return None if data is None else str(data), None
    return None, read_data(data, tokenizer or "auto")


def prepare_ids(
    ids: TokenIds,
    tokenizer: str | Tokenizer = "auto",
    cache_dir: str | Path | None = None,
    held_out: float = 0.1,
    context: int | None = None,
    validation: TokenIds | None = None,
    name: str = "token ids",
    found: tuple[str, ...] = (),
) -> IdData:
    """Returns ids as tokens to train on, and held-out tokens: `validation`, or the last share `held_out` of the ids.

    `tokenizer` is the one that made the ids, or the path of its file; by default ids have no text, and the largest one
    ends the vocabulary. `context`, if given, is checked against both sides. Raises RequestError."""
    row = as_row(ids, name)
    cut = int(len(row) * (1 - held_out))
    sides = (row[:cut], row[cut:]) if validation is None else (row, as_row(validation, name))
    made = _tokenizer_of(sides, tokenizer)
    for side, words in zip(sides, ("training", "held-out"), strict=True):
        if context is not None:
            refuse_long(context, len(side), f"{words} side of {shown(name)}")
    train, rest = (id_shards(side, made, cache_dir) for side in sides)
    rule = "the largest id ends the vocabulary" if tokenizer == "auto" else "given"
    return IdData(made, train, rest, rest.token_bytes(made), name, rule, found)


def _tokenizer_of(sides: tuple[np.ndarray, np.ndarray], tokenizer: str | Tokenizer) -> Tokenizer:
    if not isinstance(tokenizer, str):
        return tokenizer
    if tokenizer == "auto":
        return IdTokenizer(1 + max(largest(side) for side in sides))
    kind, _ = parse_spec(tokenizer)
    if kind == "path":
        return load_tokenizer(tokenizer)
    if kind != "byte":
        raise RequestError(
            f"tokenizer={tokenizer} would be made from a text, and the data are token ids; give the tokenizer.json "
            "that made them, or leave tokenizer out",
            code="conflict", field="tokenizer", value=tokenizer, expected="a tokenizer.json",
        )  # fmt: skip
    return make_tokenizer(tokenizer, list)


def largest(row: np.ndarray) -> int:
    """Returns the largest of the ids (n,), reading a mapped file a chunk at a time."""
    return max(int(row[start : start + CHUNK].max()) for start in range(0, len(row), CHUNK))


def as_row(ids: TokenIds, name: str = "") -> np.ndarray:
    """Returns the ids as one array of integers (n,), n >= 2; a mapped file stays mapped. Raises RequestError for other
    data."""
    try:
        if not hasattr(ids, "__array__"):
            ids = _joined(ids)
        row = np.asanyarray(ids).reshape(-1)
    except (TypeError, ValueError):
        row = np.empty(0)
    if len(row) < 2 or row.dtype.kind not in "iu" or (row.dtype.kind == "i" and row.min() < 0):
        raise RequestError(
            f"data must be a file, a folder, the name of a corpus, or token ids, got {_described(ids, name)}; token "
            "ids are at least two integers from 0 up: an array, a tensor, a list, an iterator, a .bin or .npy file",
            code="type", field="data", value=type(ids).__name__, expected="data to train on",
        )  # fmt: skip
    return row


def _joined(ids: TokenIds) -> np.ndarray:
    """Returns the ids of a list or an iterator, of ids or of arrays of ids, as one array (n,)."""
    parts = list(ids)
    if parts and isinstance(parts[0], int | np.integer):
        return np.asarray(parts)
    return np.concatenate([np.asarray(one).reshape(-1) for one in parts])


def _described(ids: Any, name: str) -> str:
    """Returns a description of refused data in at most 80 characters: the dtype and shape of an array, with its
    file."""
    if (dtype := getattr(ids, "dtype", None)) is not None:
        kind = f"{shown(name, 30)}, an array" if isinstance(ids, np.memmap) else type(ids).__name__
        return shown(f"{kind} of {dtype}, shape {tuple(getattr(ids, 'shape', ()))}")
    words = ids if isinstance(ids, str | int | float) else f"{type(ids).__name__} {ids[:8]!r}" if isinstance(
        ids, list | tuple) else repr(ids)  # fmt: skip
    return shown(words)
