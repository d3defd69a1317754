"""Tokenizers without a training library: of bytes, of characters, and for ids without a text."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.errors import RequestError
from glassformer.files import SCHEMAS, atomic_file
from glassformer.names.known import TOKENIZER_FORMS
from glassformer.text.documents import utf8
from glassformer.text.subword import FileTokenizer, byte_alphabet, settings_of
from glassformer.text.vocabulary import END_OF_TEXT, OWN_FILE, UNKNOWN, Ids, Tokenizer

LARGEST_VOCABULARY = 1 << 24
"""Largest vocabulary of ids without a text."""


class _Own(Tokenizer):
    """Base of tokenizers that a few plain values describe, saved in this package's format."""

    @abstractmethod
    def _fields(self) -> dict[str, Any]: ...

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self._fields(), sort_keys=True).encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        with atomic_file(Path(folder) / OWN_FILE) as temporary:
            temporary.write_text(
                json.dumps({"glassformer_tokenizer": SCHEMAS["tokenizer"], **self._fields()}), encoding="utf-8"
            )
        equivalent(self).save(folder)


class ByteTokenizer(_Own):
    """Tokenizer whose ids are the bytes of UTF-8, 0 to 255; 256 separates documents. Encodes any text, and needs no
    training."""

    kind = "byte"
    vocab_size = 257
    eos_id: int | None = 256

    def encode(self, text: str) -> Ids:
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def decode(self, ids: Any) -> str:
        array = self._known(ids)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")

    def token_bytes(self) -> np.ndarray:
        counts = np.ones(self.vocab_size, np.int64)
        counts[256] = 0
        return counts

    def _fields(self) -> dict[str, Any]:
        return {"kind": self.kind}


class CharTokenizer(_Own):
    """Tokenizer with one id for each character of an alphabet, in the order of code points.

    Without `unknown`, a character outside the alphabet raises a RequestError that names it; with `unknown`, such a
    character becomes `<unk>` (which decodes to U+FFFD). Without `separator`, `eos_id` is not set: the vocabulary has
    only the alphabet and, with `unknown`, `<unk>`.
    """

    kind = "char"

    def __init__(self, alphabet: Iterable[str], unknown: bool = False, separator: bool = False) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        self.unknown, self.separator = unknown, separator
        utf8(self.alphabet, "the alphabet")
        if not self.alphabet:
            raise RequestError(
                "a char tokenizer needs an alphabet of at least one character", code="missing", field="alphabet"
            )
        self._codes = _codes(self.alphabet)
        self.unk_id = len(self.alphabet) if unknown else None
        self.eos_id = len(self.alphabet) + unknown if separator else None
        self.vocab_size = len(self.alphabet) + unknown + separator

    @classmethod
    def train(cls, texts: Iterable[str], unknown: bool = False, separator: bool = False) -> CharTokenizer:
        """Returns the tokenizer whose alphabet is every character of `texts`."""
        alphabet: set[str] = set()
        for text in texts:
            alphabet.update(text)
        return cls(alphabet, unknown, separator)

    def encode(self, text: str) -> Ids:
        utf8(text)
        codes = _codes(text)
        ids = np.searchsorted(self._codes, codes)
        foreign = self._codes[np.minimum(ids, len(self._codes) - 1)] != codes
        if foreign.any():
            if self.unk_id is None:
                at = int(foreign.argmax())
                raise RequestError(
                    f"the character {text[at]!r} (U+{ord(text[at]):04X}) at position {at} is not among the "
                    f"{len(self.alphabet)} of this alphabet; leave it out, or use tokenizer byte or bpe",
                    code="unknown", field="alphabet", value=text[at],
                )  # fmt: skip
            ids[foreign] = self.unk_id
        return ids.astype(np.int32)

    def decode(self, ids: Any) -> str:
        array = self._known(ids)
        table = np.append(self._codes, np.uint32(0xFFFD))  # `<unk>`, if present, follows the alphabet
        return table[array[array != self.eos_id] if self.separator else array].tobytes().decode("utf-32-le")

    def token_bytes(self) -> np.ndarray:
        counts = np.zeros(self.vocab_size, np.int64)
        counts[: len(self.alphabet)] = [len(character.encode()) for character in self.alphabet]
        return counts

    def _fields(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "alphabet": self.alphabet,
            "unknown": self.unknown,
            "separator": self.separator,
        }


class IdTokenizer(_Own):
    """Tokenizer for ids that have no text: id 7 is written as "7", and ids are separated by spaces."""

    kind = "ids"
    eos_id: int | None = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> Ids:
        words = text.split()
        if wrong := next((word for word in words if not (word.isascii() and word.isdecimal())), None):
            raise RequestError(
                f"{wrong!r} is not a token id; give ids separated by spaces, such as '7 12'",
                code="syntax", field="tokens", value=wrong,
            )  # fmt: skip
        return self._checked([int(word) for word in words]).astype(np.int32)

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, self._known(ids).tolist()))

    def token_bytes(self) -> np.ndarray:
        return np.zeros(self.vocab_size, np.int64)

    def _fields(self) -> dict[str, Any]:
        return {"kind": self.kind, "vocab_size": self.vocab_size}


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def from_fields(fields: Any, path: Path) -> Tokenizer:
    """Returns the tokenizer that `fields` describe, the content of the file `path`, which `save` wrote. Raises
    RequestError for other content."""
    if isinstance(fields, dict) and fields.get("glassformer_tokenizer") == SCHEMAS["tokenizer"]:
        if fields.get("kind") == "byte":
            return ByteTokenizer()
        size = fields.get("vocab_size")
        if fields.get("kind") == "ids" and type(size) is int and 0 < size <= LARGEST_VOCABULARY:
            return IdTokenizer(size)
        alphabet, flags = fields.get("alphabet"), (fields.get("unknown"), fields.get("separator"))
        if fields.get("kind") == "char" and isinstance(alphabet, str) and all(isinstance(flag, bool) for flag in flags):
            try:
                return CharTokenizer(alphabet, bool(flags[0]), bool(flags[1]))
            except RequestError as problem:
                raise problem.of(str(path)) from None
    raise RequestError(
        f"{path} is not a Glassformer tokenizer of version 1; give {TOKENIZER_FORMS}, or a tokenizer.json",
        code="schema", field=path.name,
    )  # fmt: skip


def equivalent(tokenizer: Tokenizer) -> FileTokenizer:
    """Returns a FileTokenizer that encodes as the given byte, char or id tokenizer does."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    if isinstance(tokenizer, CharTokenizer):
        vocabulary = {character: index for index, character in enumerate(tokenizer.alphabet)}
        if tokenizer.unk_id is not None:
            vocabulary[UNKNOWN] = tokenizer.unk_id
        library = Library(models.WordLevel(vocabulary, unk_token=UNKNOWN))
        library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        library.decoder = decoders.Fuse()
    elif isinstance(tokenizer, IdTokenizer):
        library = Library(models.WordLevel({str(index): index for index in range(tokenizer.vocab_size)}))
        library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:  # byte-level BPE without merges is bytes
        library = Library(models.BPE({character: byte for byte, character in enumerate(byte_alphabet())}, []))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
    if tokenizer.eos_id is not None:
        library.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return FileTokenizer(library, settings_of(END_OF_TEXT if tokenizer.eos_id is not None else None))
