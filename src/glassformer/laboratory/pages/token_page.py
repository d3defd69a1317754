"""Page of a text by several tokenizers: a table, tokens with their ids, and the loop of generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from glassformer.figures import Box, LoopSketch, Markup, copyable, loop_drawing, plain_table, tag
from glassformer.report.html import caption, figure, framed, scroll, section

DRAWN = 2_000
"""Most tokens that are drawn for one tokenizer."""


class TokenizerRow(Protocol):
    """Interface of a text's tokens by one tokenizer, as far as the page reads them."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def ids(self) -> tuple[int, ...]: ...
    @property
    def shown_pieces(self) -> list[str]: ...
    @property
    def unknown(self) -> tuple[int, ...]: ...
    @property
    def bytes_per_token(self) -> float: ...
    @property
    def exact(self) -> bool: ...
    @property
    def end(self) -> int | None: ...


def render_tokens(text: str, rows: Sequence[TokenizerRow], data: str, command: str, values: dict[str, Any]) -> str:
    """Returns the page that shows a text split into tokens by several tokenizers, as HTML text."""
    contents = {
        "table": ("Tokenizers", section("table", "Tokenizers", _table(rows), caption(*_learned(data)))),
        "pieces": ("Pieces", section("pieces", "Pieces", *map(_pieces, rows))),
        "loop": ("From text to text", section("loop", "From text to text", _loop(text, rows[-1]))),
    }
    shortest = min(rows, key=lambda row: len(row.ids))
    finding = f"{len(text.encode()):,} bytes of text are " + ", ".join(
        f"{len(row.ids):,} tokens of {row.name}" for row in rows
    )
    header = tag(
        "header", tag("p", "Glassformer tokens", class_="kicker"), tag("h1", "A text in tokens"),
        tag("p", f"{finding}. The shortest is {shortest.name}.", class_="finding"),
        copyable(command) if command else None,
    )  # fmt: skip
    return framed("A text in tokens", header, contents, values, "tokens", "tokens")


def _learned(data: str) -> list[str]:
    words = "A tokenizer with more entries needs fewer tokens for a text, and more rows in embedding and head."
    return [words, f" Words, characters and merges come from {data}." if data else ""]


def _table(rows: Sequence[TokenizerRow]) -> Markup:
    heads = ["tokenizer", "vocabulary", "tokens", "bytes per token", "unknown", "decodes to the text"]
    body = [
        [row.name, f"{row.vocab_size:,}", f"{len(row.ids):,}", f"{row.bytes_per_token:.2f}", f"{len(row.unknown):,}",
         "yes" if row.exact else "no"]
        for row in rows
    ]  # fmt: skip
    return scroll("Tokenizers", plain_table("", heads, body))


def _pieces(row: TokenizerRow) -> Markup:
    """Returns the HTML of a text's tokens by one tokenizer, each with its id below."""
    more = len(row.ids) - DRAWN
    tokens = [
        tag("li", tag("b", piece, class_="bad" if at in row.unknown else None), tag("small", index))
        for at, (piece, index) in enumerate(zip(row.shown_pieces[:DRAWN], row.ids[:DRAWN], strict=True))
    ]
    return tag(
        "article", tag("h3", row.name), tag("ol", *tokens, class_="tokens", aria_label=f"Tokens of {row.name}"),
        caption(f"and {more:,} more") if more > 0 else None,
    )  # fmt: skip


def _loop(text: str, row: TokenizerRow) -> Markup:
    """Returns a drawing of the loop of text generation, with the text and the ids of a tokenizer."""
    ids = " ".join(map(str, row.ids[:2])) + (" …" if len(row.ids) > 2 else "")
    last, end = row.ids[-1], "" if row.end is None else f", until it is {row.end}, the end of a text"
    sketch = LoopSketch(
        (
            Box("encode", row.name), Box("model", "reads all ids"), Box("choose", "highest or drawn"),
            Box("decode", "id to its text"),
        ),
        (text, ids, f"{row.vocab_size:,} logits", "next id", "text, longer"),
        f"the next id joins the ids{end}",
        leaves=3,
        joins=1,
    )  # fmt: skip
    words = (
        f"Text is written one token at a time. {row.name} encodes it as {len(row.ids):,} ids; the model gives a score "
        f"for each of the {row.vocab_size:,} entries of the vocabulary; one is chosen and read with the rest in the "
        f"next turn. An id decodes to its piece: {last} to “{row.shown_pieces[-1]}”."
    )
    return figure(scroll("The loop of generation", loop_drawing(sketch, "The loop of generation")), caption(words))
