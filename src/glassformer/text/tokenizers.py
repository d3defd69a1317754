"""Choice of a tokenizer by its SPEC: trained once and cached, or read from a file."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from glassformer.errors import RequestError
from glassformer.files import atomic_folder, cache_folder
from glassformer.names.checks import unknown_tokenizer
from glassformer.names.known import SIZED_TOKENIZERS, TOKENIZER_FORMS
from glassformer.progress import OnProgress, silent
from glassformer.text.documents import Document
from glassformer.text.plain import ByteTokenizer, CharTokenizer, IdTokenizer, equivalent, from_fields
from glassformer.text.storage import digest
from glassformer.text.subword import (
    LARGEST_SETTINGS,
    SETTINGS_FILE,
    TEMPLATE_FILE,
    BPETokenizer,
    FileTokenizer,
    WordTokenizer,
    bounded,
    check_size,
)
from glassformer.text.vocabulary import OWN_FILE, TOKENIZER_FILES, Tokenizer

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "FileTokenizer",
    "IdTokenizer",
    "Tokenizer",
    "WordTokenizer",
    "as_file",
    "load_tokenizer",
    "make_tokenizer",
    "parse_spec",
    "replace_tokenizer",
    "with_special_token",
]

DEFAULT_BPE = 4096
DEFAULT_SIZES = {"bpe": DEFAULT_BPE, "word": 32_768}
"""Kind of a trained tokenizer -> default vocabulary size."""
VERSION = 1  # version of the training of tokenizers; part of their names in the cache

FILES = (*TOKENIZER_FILES, SETTINGS_FILE, TEMPLATE_FILE, "special_tokens_map.json", "added_tokens.json",
         "tokenizer.model", "vocab.json", "merges.txt")  # fmt: skip
"""Names of files in which this package or `transformers` looks for a tokenizer."""

Documents = Callable[[], Iterable[Document]]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Returns the tokenizer in a folder that `save` wrote or that holds a tokenizer.json, or in such a file. Raises
    RequestError for any other path."""
    path = Path(path).expanduser()
    if path.is_dir():
        for name in TOKENIZER_FILES:
            if (path / name).is_file():
                return load_tokenizer(path / name)
        raise RequestError(
            f"the folder {path} holds no tokenizer.json and no {OWN_FILE}",
            code="missing", field="tokenizer", value=str(path),
        )  # fmt: skip
    if not path.is_file():
        raise RequestError(
            f"tokenizer {str(path)!r} does not exist; give {TOKENIZER_FORMS}, or a tokenizer.json",
            code="missing", field="tokenizer", value=str(path),
        )  # fmt: skip
    if path.suffix != ".json":
        raise RequestError(
            f"tokenizer {str(path)!r} is no .json file; convert it to a tokenizer.json",
            code="type", field="tokenizer", value=str(path),
        )  # fmt: skip
    if path.name != OWN_FILE:
        return FileTokenizer.read(path)
    try:
        fields = json.loads(bounded(path, LARGEST_SETTINGS))
    except (ValueError, RecursionError) as problem:
        raise RequestError(f"{path} is not JSON ({problem})", code="syntax", field=path.name) from None
    return from_fields(fields, path)


def replace_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> None:
    """Saves the tokenizer, if any, into a folder; removes every other tokenizer's files, which a reader could take for
    it."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    if tokenizer is not None:
        tokenizer.save(folder)


def with_special_token(tokenizer: Tokenizer, name: str, token: str) -> FileTokenizer:
    """Returns the tokenizer with one more special token, as `FileTokenizer.with_special` does; other text encodes as
    before."""
    return as_file(tokenizer).with_special(name, token)


def as_file(tokenizer: Tokenizer) -> FileTokenizer:
    """Returns the tokenizer as a FileTokenizer that encodes alike, to which tokens can be added."""
    return tokenizer if isinstance(tokenizer, FileTokenizer) else equivalent(tokenizer)


def parse_spec(spec: str) -> tuple[str, int | None]:
    """Returns (kind, vocabulary size or None) of a SPEC: `byte`, `char`, `word:SIZE`, `bpe:SIZE`, or an existing path,
    whose kind is `path`. Raises RequestError."""
    kind, colon, size = spec.partition(":")
    if kind in ("byte", "char") and not colon:
        return kind, None
    if kind in SIZED_TOKENIZERS:
        if not colon:
            return kind, DEFAULT_SIZES[kind]
        if not size.isdecimal():
            raise RequestError(
                f"tokenizer {spec!r}: the size must be a whole number, as in {kind}:4096",
                code="type", field="tokenizer", value=spec,
            )  # fmt: skip
        return kind, check_size(kind, int(size))
    if Path(spec).expanduser().exists():
        return "path", None
    raise unknown_tokenizer(spec)


def make_tokenizer(
    spec: str,
    documents: Documents,
    *,
    all_documents: Documents | None = None,
    fingerprint: str | None = None,
    total_bytes: int | None = None,
    cache_dir: str | Path | None = None,
    progress: OnProgress | None = None,
) -> Tokenizer:
    """Returns the tokenizer that `spec` (see `parse_spec`) names.

    BPE learns its merges, and `word` its words, from `documents`, the training side. `char` collects its alphabet from
    `all_documents`, held-out ones included, because an unseen character could not be encoded; it has a separator if
    there is more than one document. With a `fingerprint` of both streams, a trained tokenizer is kept in the cache.
    """
    progress = progress or silent
    kind, size = parse_spec(spec)
    if kind == "path":
        return load_tokenizer(spec)
    if kind == "byte":
        return ByteTokenizer()

    def train() -> Tokenizer:
        if kind == "char":
            return _alphabet((all_documents or documents)(), total_bytes, progress)
        pieces = (piece for document in documents() for piece in document.pieces())
        made = WordTokenizer if kind == "word" else BPETokenizer
        return made.train(pieces, DEFAULT_SIZES[kind] if size is None else size, total_bytes, progress)

    if fingerprint is None:
        return train()
    kept = cache_folder(cache_dir) / "tokenizers" / digest(VERSION, fingerprint, kind, size)
    if kept.is_dir():
        try:
            return load_tokenizer(kept)
        except RequestError as problem:
            warnings.warn(f"the cached tokenizer is damaged and is trained again ({problem})")
            shutil.rmtree(kept, ignore_errors=True)
    tokenizer = train()
    with atomic_folder(kept) as temporary:
        tokenizer.save(temporary)
    return tokenizer


def _alphabet(documents: Iterable[Document], total: int | None, progress: OnProgress) -> CharTokenizer:
    alphabet: set[str] = set()
    count = done = 0
    for document in documents:
        count += 1
        for piece in document.pieces():
            alphabet.update(piece)
            done += len(piece)
            progress("collecting characters", done, total)
    return CharTokenizer(alphabet, separator=count > 1)
