"""Pairs of texts: a source that an encoder reads, and the target that is generated from it."""

from __future__ import annotations

import numpy as np

from glassformer.errors import RequestError
from glassformer.text.documents import BETWEEN, utf8
from glassformer.text.subword import FileTokenizer
from glassformer.text.tokenizers import as_file
from glassformer.text.vocabulary import Tokenizer

START = "decoder_start_token_id"
"""Key in config files of the id of the token with which a decoder starts."""
LONGEST_SOURCE = 1_000_000
"""Most characters of a source, since a longer one is refused before it is tokenised."""


def source_ids(tokenizer: Tokenizer, text: str, context: int) -> list[int]:
    """Returns the ids of a source for an encoder, with the special tokens that the tokenizer's file adds, and an end
    token if the added ones have none. Raises RequestError for an empty source, and for more than `context` tokens."""
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


def added_around(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids before, ids after) that the tokenizer's file adds around a text (BERT's [CLS] and [SEP]); both are
    empty for most files."""
    none = np.empty(0, np.int64)
    if not isinstance(tokenizer, FileTokenizer):
        return none, none
    whole, bare = (tokenizer.encode("a", add_specials=one) for one in (True, False))
    places = range(len(whole) - len(bare) + 1)
    first = next((i for i in places if np.array_equal(whole[i : i + len(bare)], bare)), 0)
    return whole[:first].astype(np.int64), whole[first + len(bare) :].astype(np.int64)


def question_row(tokenizer: Tokenizer, question: np.ndarray, context: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids (s,) and segments (s,) of a question, a tab and the text `context` that holds its answer, in BERT's
    format: segment 0 up to the tab, then 1, with the special tokens that the tokenizer's file adds around both."""
    front, behind = added_around(tokenizer)
    first = np.concatenate([front, question, tokenizer.encode(BETWEEN)])
    row = np.concatenate([first, context, behind]).astype(np.int64)
    return row, (np.arange(len(row)) >= len(first)).astype(np.int64)


def as_trained(tokenizer: Tokenizer) -> Tokenizer:
    """Returns the tokenizer for a run on pairs: a copy whose file adds only the end token, after a source; `tokenizer`
    itself if it has no end token."""
    return tokenizer if tokenizer.eos_id is None else as_file(tokenizer).adding_behind(tokenizer.eos_id)


def as_read(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a copy of the tokenizer whose file adds the end token after a source, as `source_ids` does; `tokenizer`
    itself if its file adds tokens already, or if it has no end token."""
    if tokenizer.eos_id is None or len((known := as_file(tokenizer)).encode("", add_specials=True)):
        return tokenizer
    return known.adding_behind(tokenizer.eos_id)
