"""Interface of tokenizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.errors import RequestError

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<unk>"
OWN_FILE = "glassformer_tokenizer.json"
TOKENIZER_FILES = (OWN_FILE, "tokenizer.json")
"""Names of a saved tokenizer's main file, the preferred first; a folder may have further files."""

Ids = np.ndarray
"""Token ids, (n,) int32."""


class Tokenizer(ABC):
    """Base of tokenizers: text to token ids and back.

    `kind` names the rule (`byte`, `char`, `bpe`, ...); ids are in [0, vocab_size); `eos_id` is appended after each
    document, None if documents are concatenated without one.
    """

    kind: str
    vocab_size: int
    eos_id: int | None
    mask_id: int | None = None
    """Id of the mask token, whose place is to be predicted; None without such a token."""
    unk_id: int | None = None
    """Id of the unknown token; None without such a token."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that have no text."""
        return frozenset() if self.eos_id is None else frozenset((self.eos_id,))

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Returns the ids of a text, a numpy array (n,) int32; `torch.tensor(ids)[None]` is a model's input row. Text
        is data: a special token spelled out in it is encoded as its characters."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the ids of each text, as `encode`; faster than one by one if the tokenizer uses threads."""
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str) -> Ids:
        """Returns the ids (n,) int32 of a prompt, as the published tokenizer reads it: special tokens spelled in the
        text are parsed, and those that its file adds to a text are added."""
        return self.encode(text)

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token by its exact text; None for a missing token, and for a tokenizer without token
        names."""
        return None

    @abstractmethod
    def decode(self, ids: Any) -> str:
        """Returns the text of a sequence, array or tensor of ids.

        Special tokens have no text; neither have ids past the vocabulary, which a model with a padded one may generate.
        Broken UTF-8 becomes U+FFFD. Raises RequestError for a negative id."""

    @abstractmethod
    def token_bytes(self) -> np.ndarray:
        """Returns the number of UTF-8 bytes of text of each id, (vocab_size,) int64, 0 for special tokens.

        bits per byte = sum(nll of targets in nats) / (ln 2 * sum(token_bytes[targets]))
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Returns a hash that is equal for tokenizers that encode alike, in any process and on any machine."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Writes a folder that `load_tokenizer` reads, with a `tokenizer.json` for Hugging Face."""

    def _known(self, ids: Any) -> np.ndarray:
        """Returns the ids (n,) that are below vocab_size; others are dropped. Raises RequestError for a negative id."""
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        return self._checked(array[array < self.vocab_size])

    def _checked(self, ids: Any) -> np.ndarray:
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        if array.size and not (array.min() >= 0 and array.max() < self.vocab_size):
            wrong = next(int(i) for i in array if not 0 <= i < self.vocab_size)
            raise RequestError(
                f"token id {wrong} is outside this vocabulary of {self.vocab_size}",
                code="range", field="tokens", value=wrong,
            )  # fmt: skip
        return array
