"""Bytes and log-probabilities of tokens, matched to the text that is sent."""

from __future__ import annotations

from dataclasses import dataclass

from glassformer.generation.engine import TextPiece
from glassformer.text.spelling import Spelling

LEAST = -9999.0
"""Log-probability that is sent for a token of probability 0: JSON has no infinity."""


@dataclass(frozen=True)
class SpelledToken:
    """A token with its bytes and log-probabilities, as an answer reports it."""

    id: int
    bytes: bytes
    logprob: float
    top: dict[int, float]

    @property
    def text(self) -> str:
        """Text of the token, with U+FFFD for part of a character."""
        return self.bytes.decode("utf-8", "replace")


class Entries:
    """Tokens of a growing text, each returned once its last character can be shown; their bytes join to the text."""

    def __init__(self, spelling: Spelling, ends: frozenset[int]) -> None:
        self._spelling, self._ends = spelling, ends
        self._pending: list[TextPiece] = []
        self._text = b""

    def add(self, piece: TextPiece) -> list[SpelledToken]:
        """Returns the entries that a piece completes."""
        if piece.id is not None and piece.id not in self._ends:
            self._pending.append(piece)
        self._text += piece.bytes
        found: list[SpelledToken] = []
        while self._pending and self._text:
            raw = self._spelling.bytes(self._pending[0].id or 0)
            if not self._text.startswith(raw):
                if raw.startswith(self._text):  # further characters are held back
                    break
                last = self._pending[-1]
                whole = len(self._pending) == 1 or self._text.endswith(self._spelling.bytes(last.id or 0) or b"\0")
                kept = [] if whole else [self._pending.pop()]  # its bytes may still become a character
                found += self.close()
                self._pending = kept
                break
            found.append(self._entry(self._pending.pop(0), raw))
            self._text = self._text[len(raw) :]
        return found

    def close(self) -> list[SpelledToken]:
        """Ends the text: returns the pending tokens, the last one with all pending bytes, the others with none. If no
        bytes are pending, drops the tokens and returns []."""
        some, text = self._pending, self._text
        self._pending, self._text = [], b""
        if not text:
            return []
        return [self._entry(piece, text if piece is some[-1] else b"") for piece in some]

    def _entry(self, piece: TextPiece, raw: bytes) -> SpelledToken:
        return SpelledToken(piece.id or 0, raw, bounded_logprob(piece.logprob), piece.top_logprobs or {})


def bounded_logprob(logprob: float | None) -> float:
    """Returns a log-probability that JSON can hold."""
    return LEAST if logprob is None or not logprob > LEAST else logprob
