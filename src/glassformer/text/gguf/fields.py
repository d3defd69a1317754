"""Names of tokenizer metadata in a GGUF file, and checks of their untrusted values."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np

from glassformer.errors import RequestError
from glassformer.text.documents import utf8

PREFIX = "tokenizer.ggml."
CHAT_TEMPLATE = "tokenizer.chat_template"  # names of further templates: this, a dot, the name
CHAT_TEMPLATES = "tokenizer.chat_templates"  # list of the names

SPECIAL_IDS = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",  # the format's spelling
    "mask": "mask_token",
}
"""NAME of `tokenizer.ggml.NAME_token_id` -> key of the same token in a tokenizer_config.json."""

LARGEST_VOCABULARY = 1 << 21
LARGEST_MERGES = 1 << 22
LARGEST_TEXT = 1 << 26  # characters of all tokens, or of all merges


class TokenType(IntEnum):
    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GGUFFields:
    """Metadata of a GGUF under `tokenizer.ggml.`, checked when read: a value of an unexpected type raises
    RequestError."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata

    def _get(self, key: str) -> Any:
        return self.metadata.get(PREFIX + key)

    def text(self, key: str) -> str | None:
        value = self._get(key)
        if value is not None and not isinstance(value, str):
            raise RequestError(
                f"{PREFIX}{key} is {_kind(value)}; it must be a string", code="type", field=f"{PREFIX}{key}"
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, (bool, np.bool_)):
            raise RequestError(
                f"{PREFIX}{key} is {_kind(value)}; it must be true or false", code="type", field=f"{PREFIX}{key}"
            )
        return bool(value)

    def token_id(self, key: str, vocab_size: int) -> int | None:
        value = self._get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise RequestError(
                f"{PREFIX}{key} is {_kind(value)}; it must be a token id", code="type", field=f"{PREFIX}{key}"
            )
        if not 0 <= value < vocab_size:
            raise RequestError(
                f"{PREFIX}{key}={value} is outside this vocabulary of {vocab_size}",
                code="range", field=f"{PREFIX}{key}", value=value,
            )  # fmt: skip
        return int(value)

    def texts(self, key: str, most: int) -> list[str] | None:
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise RequestError(
                f"{PREFIX}{key} is {_kind(value)}; it must be a list of strings", code="type", field=f"{PREFIX}{key}"
            )
        if len(value) > most:
            raise RequestError(
                f"{PREFIX}{key} has {len(value)} entries; more than {most} are refused",
                code="range", field=f"{PREFIX}{key}", value=len(value),
            )  # fmt: skip
        wrong = next((index for index, text in enumerate(value) if not isinstance(text, str)), None)
        if wrong is not None:
            raise RequestError(
                f"{PREFIX}{key}[{wrong}] is {_kind(value[wrong])}; it must be a string",
                code="type", field=f"{PREFIX}{key}[{wrong}]",
            )  # fmt: skip
        if sum(map(len, value)) > LARGEST_TEXT:
            raise RequestError(
                f"{PREFIX}{key} has more than {LARGEST_TEXT} characters; that many are refused",
                code="range", field=f"{PREFIX}{key}",
            )  # fmt: skip
        utf8("".join(value), PREFIX + key)
        return list(value)

    def numbers(self, key: str, length: int | None, kinds: str) -> np.ndarray | None:
        """Returns a one-dimensional array under `key`, None if it is missing. `kinds`: accepted NumPy kinds (`iu`
        integers, `f` floating point); `length`: required length, None for any. Raises RequestError."""
        value = self._get(key)
        if value is None:
            return None
        try:
            array = np.asarray(value)
        except (ValueError, OverflowError):  # a list of lists of several lengths
            array = np.asarray(None)
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise RequestError(
                f"{PREFIX}{key} is {_kind(value)}; it must be a list of numbers", code="type", field=f"{PREFIX}{key}"
            )
        if length is not None and len(array) != length:
            raise RequestError(
                f"{PREFIX}{key} has {len(array)} entries for {length} tokens; it must have one for each",
                code="conflict", field=f"{PREFIX}{key}", value=len(array),
            )  # fmt: skip
        return array


def _kind(value: Any) -> str:
    return (
        f"{str(value)[:40]!r} ({type(value).__name__})" if np.isscalar(value) else f"of the type {type(value).__name__}"
    )
