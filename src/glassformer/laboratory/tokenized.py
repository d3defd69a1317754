"""A text by several tokenizers: tokens, ids, length, unknown tokens, bytes per token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.text import Text

from glassformer.conversion import checkpoints
from glassformer.errors import RequestError, shown
from glassformer.figures.plain import plain
from glassformer.figures.terminal import Reported, Tabular, dim, ruled, unbroken
from glassformer.files import check_output, output
from glassformer.laboratory.pages.token_page import render_tokens
from glassformer.lens.page.words import spelled_text, visible
from glassformer.names.checks import check_tokenizers
from glassformer.names.known import TOKENIZERS
from glassformer.progress import silent
from glassformer.text import (
    ByteTokenizer,
    CharTokenizer,
    Split,
    Tokenizer,
    choose_tokenizer,
    open_corpus,
    split,
    trained_tokenizer,
)
from glassformer.typed import typed

USUAL = ("byte", "char", "word", "bpe:4096")
"""Tokenizers that are compared by default."""
DATA = "python-docs"
LONGEST = 100_000
"""Most characters of a text."""
SHOWN = 200
"""Most tokens of a text that a terminal shows."""
UNKNOWN = "<unk>"
LOOP = "text -> encode -> ids -> model -> logits -> choose -> next id, which joins the ids, until the end -> decode"


@dataclass(frozen=True)
class TokenizedText:
    """Tokens into which one tokenizer splits a text."""

    name: str
    """Name of the tokenizer as requested."""
    kind: str
    vocab_size: int
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    """Text of each token; a character split over several tokens belongs to the last, and the others are empty."""
    unknown: tuple[int, ...]
    """Positions of tokens whose text is not in the vocabulary."""
    text_bytes: int
    """UTF-8 bytes of the text."""
    exact: bool
    """True if the ids decode to the text."""
    end: int | None
    """Id of the end-of-text token; None without one."""

    @property
    def bytes_per_token(self) -> float:
        """Mean number of UTF-8 bytes of the text per token."""
        return self.text_bytes / len(self.ids)

    @property
    def shown_pieces(self) -> list[str]:
        """Texts of the tokens, with control characters made visible."""
        return [UNKNOWN if at in self.unknown else visible(piece) for at, piece in enumerate(self.pieces)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the tokens of the text as plain values."""
        values: dict[str, Any] = plain(self)
        return values | {"tokens": len(self.ids), "bytes_per_token": self.bytes_per_token}


@dataclass(frozen=True)
class TokenTable(Reported, Tabular):
    """Comparison of several tokenizers on one text.

    Attributes
    ----------
    text : str
        The text.
    rows : tuple of TokenizedText
        Its tokens by each tokenizer, in the order asked for.
    data : str
        Text on which tokenizers were trained; empty if none of them was.
    command : str
        Command that repeats the table.
    page : str
        The page that was written; empty without one.

    Examples
    --------
    >>> found = gf.tokens("The cat", ["byte"])
    >>> found.rows[0].ids
    (84, 104, 101, 32, 99, 97, 116)
    """

    text: str
    rows: tuple[TokenizedText, ...]
    data: str = ""
    command: str = ""
    page: str = ""

    def lines(self) -> Iterator[Any]:
        """Yields the printed text: a table of all tokenizers, then the tokens and ids of each."""
        table = ruled()
        for heading in ("tokenizer", "vocabulary", "tokens", "bytes per token", "unknown", "decodes to the text"):
            table.add_column(heading, justify="left" if heading == "tokenizer" else "right")
        for row in self.rows:
            table.add_row(
                row.name, f"{row.vocab_size:,}", f"{len(row.ids):,}", f"{row.bytes_per_token:.2f}",
                f"{len(row.unknown):,}", "yes" if row.exact else "no",
            )  # fmt: skip
        yield table
        if self.data:
            yield dim(f"words, characters and merges come from {self.data}")
        for row in self.rows:
            more = f" and {len(row.ids) - SHOWN:,} more" if len(row.ids) > SHOWN else ""
            yield Text(f"\n{row.name}", style="bold")
            yield "│".join(row.shown_pieces[:SHOWN]) + more
            yield dim(" ".join(map(str, row.ids[:SHOWN])) + more)
        yield dim(f"\n{LOOP}")
        if self.page:
            yield unbroken(f"page: {self.page}")

    def to_dict(self) -> dict[str, Any]:
        return {"text": self.text, "data": self.data, "tokenizers": [row.to_dict() for row in self.rows]}

    def records(self) -> list[dict[str, Any]]:
        """Returns a table row for each token of each tokenizer."""
        return [
            {"tokenizer": row.name, "position": at, "piece": piece, "id": index, "unknown": at in row.unknown}
            for row in self.rows
            for at, (piece, index) in enumerate(zip(row.pieces, row.ids, strict=True))
        ]

    def html(self) -> str:
        return render_tokens(self.text, self.rows, self.data, self.command, self.to_dict())


@typed
def tokens(
    text: str,
    tokenizers: str | Sequence[str | Tokenizer] = USUAL,
    *,
    data: str | Path = DATA,
    out: str | Path | None = None,
    force: bool = False,
    command: str = "",
) -> TokenTable:
    """Splits a text into tokens by several tokenizers.

    Parameters
    ----------
    text
        The text.
    tokenizers
        Tokenizers, or their names, as a sequence or with commas: "byte", "char", "word:SIZE", "bpe:SIZE", the path of
        a tokenizer.json, or a model with a tokenizer, such as "smollm2" or a run folder.
    data
        Text on which char, word and bpe are trained, as `train` trains them.
    out
        HTML page to write: pieces and ids by each tokenizer, and the loop of generation.
    force
        Replace a file that this program did not write.
    command
        Command that repeats the table, for the page.

    Returns
    -------
    TokenTable
        Pieces, ids, unknown tokens and bytes per token by each tokenizer.

    Raises
    ------
    RequestError
        For a text that is empty or too long, and an unknown tokenizer.

    Examples
    --------
    >>> found = gf.tokens("The cat sat", "byte,word", data="tiny.txt")
    >>> [(row.name, len(row.ids)) for row in found.rows]
    [('byte', 11), ('word', 3)]
    """
    if not 0 < len(text) <= LONGEST:
        raise RequestError(
            code="range", field="text", value=shown(text), expected=f"a text of 1 to {LONGEST:,} characters"
        )
    asked = tokenizers.split(",") if isinstance(tokenizers, str) else list(tokenizers)
    check_tokenizers([one for one in asked if isinstance(one, str)])
    if out is not None:
        check_output(out, force=force)
    source = _Source(str(data))
    rows = tuple(_tokenized(text, one, source) for one in asked)
    found = TokenTable(text, rows, str(data) if source.read else "", command, "" if out is None else str(out))
    if out is not None:
        with output(out, force=force):
            found.report(out)
    return found


class _Source:
    """Training text for tokenizers, loaded only when the first tokenizer is trained on it."""

    def __init__(self, data: str) -> None:
        self.data = data
        self.read = False

    @cached_property
    def sides(self) -> Split:
        self.read = True
        return split(open_corpus(self.data), 0.1, 0, silent)

    def tokenizer(self, name: str) -> Tokenizer:
        """Returns the tokenizer of this name, trained on the text. Characters outside its alphabet become unknown
        tokens."""
        if name == "byte":
            return ByteTokenizer()
        made = trained_tokenizer(choose_tokenizer(self.sides.corpus)[0] if name == "auto" else name, self.sides)
        if isinstance(made, CharTokenizer):
            return CharTokenizer(made.alphabet, unknown=True, separator=made.separator)
        return made


def _tokenized(text: str, asked: str | Tokenizer, source: _Source) -> TokenizedText:
    if not isinstance(asked, str):
        name, tokenizer = asked.kind, asked
    elif asked.partition(":")[0] in TOKENIZERS:
        name, tokenizer = asked, source.tokenizer(asked)
    else:
        name, tokenizer = asked, checkpoints.read_tokenizer(asked)
    ids = tokenizer.encode(text)
    found = tuple(map(int, ids))
    return TokenizedText(
        name=name,
        kind=tokenizer.kind,
        vocab_size=tokenizer.vocab_size,
        ids=found,
        pieces=tuple(spelled_text(found, tokenizer)),
        unknown=tuple(at for at, token in enumerate(found) if token == tokenizer.unk_id),
        text_bytes=len(text.encode()),
        exact=tokenizer.decode(ids) == text,
        end=tokenizer.eos_id,
    )
