"""Cuts documents into passages that fit into an encoder's context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from glassformer.generation.vectors import tokenized
from glassformer.text import Tokenizer
from glassformer.text.documents import Document, in_pieces

TOGETHER = 256
"""Number of paragraphs whose tokens are counted in one call"""
JOINT = "\n\n"
LONGEST = 1 << 16
"""Largest number of characters of a paragraph; tables and minified files have no blank lines"""
CHARACTERS = 32
"""Mean characters per token above any natural text. WordPiece reads an unbroken string of any length as one unknown
token."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a document; `text` starts at the document's character `start`."""

    document: str
    start: int
    text: str


class Splitter:
    """Cuts documents at paragraph boundaries into passages of at most `most` tokens.

    Paragraphs, separated by blank lines, are joined as long as they fit. A paragraph that does not fit by itself is cut
    at the ends of lines, otherwise at spaces. No text is left out. Tokens are counted with `tokenizer`, without special
    ones; a passage has at most CHARACTERS characters per token.
    """

    def __init__(self, tokenizer: Tokenizer, most: int):
        self.tokenizer, self.most = tokenizer, most
        self.joint = self.counts([JOINT])[0]

    def counts(self, texts: Iterable[str]) -> list[int]:
        """Returns the number of tokens of each text, at least one per CHARACTERS characters."""
        texts = list(texts)
        rows = self.tokenizer.encode_batch(texts)
        return [max(len(row), -(-len(text) // CHARACTERS)) for text, row in zip(texts, rows, strict=True)]

    def __call__(self, document: Document) -> Iterator[Passage]:
        waiting: list[tuple[int, str]] = []
        tokens = 0
        for start, text, count in self.parts(document):
            if waiting and tokens + self.joint + count > self.most:
                yield from self.joined(document.name, waiting)
                waiting, tokens = [], 0
            tokens += count + (self.joint if waiting else 0)
            waiting.append((start, text))
        yield from self.joined(document.name, waiting)

    def joined(self, name: str, paragraphs: list[tuple[int, str]]) -> Iterator[Passage]:
        """Yields the paragraphs as one passage; if it has more than `most` tokens, joins each half separately."""
        if not paragraphs:
            return
        text = JOINT.join(text for _, text in paragraphs)
        if len(paragraphs) > 1 and self.counts([text])[0] > self.most:
            half = len(paragraphs) // 2
            yield from self.joined(name, paragraphs[:half])
            yield from self.joined(name, paragraphs[half:])
        else:
            yield Passage(name, paragraphs[0][0], text)

    def parts(self, document: Document) -> Iterator[tuple[int, str, int]]:
        """Yields (start, text, tokens) of each paragraph, and of the pieces of those that are too long."""
        found = paragraphs(document.pieces())
        while some := list(islice(found, TOGETHER)):
            for (start, text), count in zip(some, self.counts(text for _, text in some), strict=True):
                yield from self.cut(start, text, count)

    def cut(self, start: int, text: str, count: int) -> Iterator[tuple[int, str, int]]:
        """Yields (start, text, tokens) of pieces of at most `most` tokens, without white space at their ends."""
        if count <= self.most or len(text) == 1:  # one character of many bytes, which the encoder cuts
            yield start, text, count
            return
        size = max(1, min(len(text) - 1, len(text) * self.most * 9 // (count * 10)))
        pieces, at = list(in_pieces([text], size)), start
        for piece, tokens in zip(pieces, self.counts(piece.strip() for piece in pieces), strict=True):
            if plain := piece.strip():
                yield from self.cut(at + piece.index(plain[0]), plain, tokens)
            at += len(piece)


def paragraphs(pieces: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yields (start, text) of each paragraph of a text that comes in pieces; one of more than `LONGEST` characters in
    several."""
    at, begin, lines, size = 0, 0, list[str](), 0
    for line in (line for piece in pieces for line in piece.splitlines(keepends=True)):
        if line.strip() and size <= LONGEST:
            begin = begin if lines else at
            lines.append(line)
            size += len(line)
        elif lines:
            yield begin, "".join(lines).rstrip()
            begin, lines, size = (at, [line], len(line)) if line.strip() else (at, [], 0)
        at += len(line)
    if lines:
        yield begin, "".join(lines).rstrip()


def special_tokens(tokenizer: Tokenizer, limit: int) -> int:
    """Returns the number of special tokens that the tokenizer adds to each text."""
    return len(tokenized(tokenizer, ["a"], limit)[0]) - len(tokenizer.encode_batch(["a"])[0])
