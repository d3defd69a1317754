"""Pairs of texts: a source that an encoder reads, and the target that is written from it."""

from __future__ import annotations

from glassformer.errors import RequestError
from glassformer.text.documents import utf8
from glassformer.text.subword import FileTokenizer
from glassformer.text.tokenizers import as_file
from glassformer.text.vocabulary import Tokenizer

START = "decoder_start_token_id"
"""What a folder calls the token that a text which is written from a source begins with."""
LONGEST_SOURCE = 1_000_000
"""Characters: what no encoder here reads is refused before it is tokenised."""


def source_ids(tokenizer: Tokenizer, text: str, context: int) -> list[int]:
    """A source as an encoder reads it: with what the tokenizer's file adds to a text, and an end behind it where that
    has none. Raises RequestError for an empty one, and for more than `context` tokens."""
    if not text or len(text) > LONGEST_SOURCE:
        raise RequestError(
            f"the source has {len(text):,} characters; give from 1 to {LONGEST_SOURCE:,}",
            code="range", field="source", value=len(text), expected="a text",
        )  # fmt: skip
    utf8(text, "the source")
    if isinstance(tokenizer, FileTokenizer):
        ids, added = (tokenizer.encode(one, add_specials=True).tolist() for one in (text, ""))
    else:
        ids, added = tokenizer.encode(text).tolist(), []
    if tokenizer.eos_id is not None and tokenizer.eos_id not in added:
        ids.append(tokenizer.eos_id)
    if len(ids) > context:
        raise RequestError(
            f"the source has {len(ids):,} tokens, and this model's encoder reads {context:,}; give a shorter one",
            code="range", field="source", value=len(ids), expected=f"at most {context:,} tokens",
        )  # fmt: skip
    return ids


def as_trained(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer of a run on pairs, whose sources have an end behind them and nothing else that a file may add."""
    return tokenizer if tokenizer.eos_id is None else as_file(tokenizer).adding_behind(tokenizer.eos_id)


def as_read(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer as a file that says what `source_ids` adds: an end, where its own file adds nothing."""
    if tokenizer.eos_id is None or len((known := as_file(tokenizer)).encode("", add_specials=True)):
        return tokenizer
    return known.adding_behind(tokenizer.eos_id)
