"""Bytes of single tokens."""

from __future__ import annotations

import json
from functools import cached_property, lru_cache

from glassformer.text.subword import FileTokenizer, byte_alphabet
from glassformer.text.vocabulary import Tokenizer

SPACE = "\u2581"


class Spelling:
    """Bytes and text of single tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.bytes = lru_cache(1 << 16)(self._bytes)

    @cached_property
    def _names(self) -> dict[int, str]:
        assert isinstance(self.tokenizer, FileTokenizer)
        return {index: name for name, index in self.tokenizer.ids().items()}

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        """Character in which byte-level BPE writes a byte -> that byte; {} for other tokenizers."""
        assert isinstance(self.tokenizer, FileTokenizer)
        description = self.tokenizer.description()
        steps = json.dumps([description.get(key) for key in ("pre_tokenizer", "decoder")])
        return {character: byte for byte, character in enumerate(byte_alphabet())} if '"ByteLevel"' in steps else {}

    def _bytes(self, token: int) -> bytes:
        """Returns the bytes of text of the token with this id; b"" for a special token."""
        if token in self.tokenizer.special_ids:
            return b""
        if not isinstance(self.tokenizer, FileTokenizer):
            if self.tokenizer.kind == "byte":
                return bytes([token]) if token < 256 else b""
            return self.tokenizer.decode([token]).encode()
        name = self._names.get(token, "")
        if self._alphabet and all(character in self._alphabet for character in name):
            return bytes(self._alphabet[character] for character in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return name.replace(SPACE, " ").encode() if name.startswith(SPACE) else self.tokenizer.decode([token]).encode()

    def text(self, token: int) -> str:
        """Returns the text of the token with this id, with U+FFFD for part of a character."""
        return self.bytes(token).decode("utf-8", "replace")
