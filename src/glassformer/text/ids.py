"""Token ids that a caller already has, as data to train on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.errors import RequestError, shown
from glassformer.progress import OnProgress
from glassformer.text.data import Tokens, prepare
from glassformer.text.plain import IdTokenizer
from glassformer.text.shards import id_shards
from glassformer.text.tokenizers import Tokenizer, load_tokenizer

TokenIds = Iterable[Any]
"""An array, a tensor, a list or an iterator of token ids, or of arrays of them, which follow each other."""

DataLike = str | Path | Tokens | TokenIds
"""Ways to say what is trained on: a name or path (`open_corpus`), tokens, or token ids."""


def read_data(
    data: DataLike,
    tokenizer: str | Tokenizer = "auto",
    context: int | None = None,
    progress: OnProgress | None = None,
) -> Tokens:
    """Returns the tokens of data as every verb takes it. Raises RequestError."""
    if isinstance(data, Tokens):
        return data
    if isinstance(data, str | Path):
        return prepare(data, tokenizer, context=context, progress=progress)
    return prepare_ids(data, tokenizer)


def named_or_read(data: DataLike | None, tokenizer: str | Tokenizer | None = None) -> tuple[str | None, Tokens | None]:
    """Returns the name of data that has one, and the tokens of data in memory; None for the other. Raises
    RequestError."""
    if data is None or isinstance(data, str | Path):
        return None if data is None else str(data), None
    return None, read_data(data, tokenizer or "auto")


def prepare_ids(
    ids: TokenIds,
    tokenizer: str | Tokenizer = "auto",
    cache_dir: str | Path | None = None,
    held_out: float = 0.1,
) -> Tokens:
    """Returns ids as tokens to train on, and the last `held_out` of them as held-out tokens.

    `tokenizer` is the one that made the ids, or the path of its file; by default ids have no text, and the largest one
    ends the vocabulary. Raises RequestError."""
    row = as_row(ids)
    if isinstance(tokenizer, str):
        tokenizer = IdTokenizer(int(row.max()) + 1) if tokenizer == "auto" else load_tokenizer(tokenizer)
    cut = int(len(row) * (1 - held_out))
    train, validation = (id_shards(side, tokenizer, cache_dir) for side in (row[:cut], row[cut:]))
    return Tokens(tokenizer, train, validation, validation.token_bytes(tokenizer))


def as_row(ids: TokenIds) -> np.ndarray:
    """Returns the ids as one array (n,) of integers. Raises RequestError for anything else."""
    try:
        if not hasattr(ids, "__array__"):
            ids = np.concatenate([np.asarray(one).reshape(-1) for one in ids])
        row = np.asarray(ids).reshape(-1)
    except (TypeError, ValueError):
        row = np.empty(0)
    if len(row) < 2 or row.dtype.kind not in "iu" or row.min() < 0:
        raise RequestError(
            f"data must be a file, a folder, the name of a corpus, or token ids, got {shown(repr(ids))}; token ids are "
            "at least two integers from 0 up, in an array, a tensor, a list or an iterator",
            code="type", field="data", value=type(ids).__name__, expected="data to train on",
        )  # fmt: skip
    return row
