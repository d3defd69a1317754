"""Documents and corpora as values: a name, and a function that reads the text repeatedly, in pieces of bounded size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from glassformer.errors import RequestError

BETWEEN = "\t"
"""Separator of the fields of a record in its document, such as source and target of a pair."""
PIECE = 256 * 1024  # characters; bounds the memory of one encode call


def utf8(text: str, what: str = "text") -> bytes:
    """Returns the UTF-8 bytes of `text`. Raises RequestError, with the position, for a lone surrogate, which UTF-8
    cannot encode.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as problem:
        code = ord(text[problem.start])
        raise RequestError(
            f"{what} holds a lone surrogate U+{code:04X} at character {problem.start}, "
            "which is not Unicode text; remove it, or decode the text as UTF-8",
            code="syntax", field=what.removeprefix("the ").replace(" ", "_"), value=problem.start,
        ) from problem  # fmt: skip


def mended(text: str) -> str:
    """Returns `text` with U+FFFD instead of each lone surrogate, which JSON can carry."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# A cut after "x\n" before a visible character falls between two pre-tokens of the GPT-2 pattern, so the
# pieces of a text encode to the same tokens as the whole.
_CLEAN_CUT = re.compile(r"\S\n(?=\S)")


def _cut(text: str, size: int) -> int:
    """Returns the index at which to cut `text`, longer than `size`: at a line end, else a space, in the second half of
    its first `size` characters if possible."""
    clean = 0
    for match in _CLEAN_CUT.finditer(text, size // 2, size + 1):
        clean = match.end()
    if clean and clean <= size:
        return clean
    line = text.rfind("\n", size // 2, size)
    if line >= 0:
        return line + 1
    space = text.rfind(" ", size // 2, size)  # before the space: byte-level BPE joins it to the next word
    return space if space > 0 else size


def in_pieces(chunks: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """Yields the concatenated `chunks` in non-empty pieces of at most `size` characters, cut at line ends if
    possible."""
    waiting = ""
    for chunk in chunks:
        waiting += chunk
        begin = 0
        # One more character than `size` must be known, to see whether the cut is clean.
        while len(waiting) - begin > size:
            window = waiting[begin : begin + size + 1]
            cut = _cut(window, size)
            yield window[:cut]
            begin += cut
        waiting = waiting[begin:]
    if waiting:
        yield waiting


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a name. `source` is the text, or a function that reads it from the start, in chunks. Documents of one
    `group` are held out together, or not at all; None for a document by itself."""

    name: str
    source: str | Callable[[], Iterable[str]]
    group: str | None = None

    def pieces(self, size: int = PIECE) -> Iterator[str]:
        """Yields the text in non-empty pieces of at most `size` characters: the only way to read a document larger than
        memory.
        """
        chunks = [self.source] if isinstance(self.source, str) else self.source()
        return in_pieces(chunks, size)

    @property
    def text(self) -> str:
        """The whole text, in memory."""
        return self.source if isinstance(self.source, str) else "".join(self.source())


@dataclass(frozen=True)
class Corpus:
    """A named stream of documents that can be read repeatedly, always in the same order.

    `fingerprint` is a hash of the content: equal texts have equal fingerprints in any place. `size` is the approximate
    number of bytes read for all documents (None if unknown); `notes` are remarks of the opener (files skipped, split
    chosen), and become part of `describe()`. `task` names the task whose rows the documents are (`tasks.py`), else
    None.
    """

    name: str
    fingerprint: str
    source: Callable[[], Iterable[Document]]
    size: int | None = None
    notes: Mapping[str, object] = field(default_factory=dict)
    task: str | None = None

    def documents(self) -> Iterator[Document]:
        return iter(self.source())

    def describe(self) -> dict[str, object]:
        return {"name": self.name, "fingerprint": self.fingerprint, **self.notes}
