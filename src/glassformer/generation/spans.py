"""Spans of a text as answers to questions (extractive question answering)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.generation.vectors import Reader
from glassformer.introspection import at_rest
from glassformer.model import Model
from glassformer.text.documents import utf8
from glassformer.text.pairs import added_around, question_row


@dataclass(frozen=True)
class Span:
    """Answer to a question: a part of the given text, with its probability."""

    text: str
    probability: float
    """p(start) p(end), each among all tokens of question and text."""


def best_span(logits: Float[Tensor, "s 2"], first: int, last: int) -> tuple[int, int, float]:
    """Returns the first and last token of the most likely span that starts at `first` or later and ends before `last`,
    and its probability p(start) p(end): the largest sum of both logits with start <= end (Devlin et al. 2018)."""
    start, end = logits.float().log_softmax(0)[first:last].T
    sums = (start[:, None] + end[None]).triu()
    sums = sums.masked_fill(torch.ones_like(sums).tril(-1).bool(), -torch.inf)
    place = int(sums.argmax())
    begin, stop = divmod(place, last - first)
    return first + begin, first + stop, float(sums.flatten()[place].exp())


@torch.inference_mode()
def answer_span(model: Model, row: np.ndarray, segments: np.ndarray, behind: int) -> tuple[int, int, float]:
    """Returns the first and the last token, as indices of `row`, of the most likely answer in the text of a
    `question_row`, and its probability p(start) p(end).

    `row` (s,) holds the tokens, `segments` (s,) is 1 from the text on, and `behind` is the number of special tokens
    that follow the text."""
    tokens = torch.from_numpy(row)[None].to(model.device)
    with at_rest(model):
        logits = model(tokens, segments=given_segments(model, torch.from_numpy(segments)[None].to(model.device)))[0]
    return best_span(logits, int(segments.argmax()), len(row) - behind)


def given_segments(model: Model, segments: Tensor) -> Tensor | None:
    """Returns `segments` (b, s) if the model has embeddings of two or more segments, else None."""
    return segments if (model.config.embedding.segments or 1) > 1 else None


def answer(loaded: Reader, question: str, context: str) -> Span:
    """Returns the span of `context` that answers `question`. Raises RequestError for a model without a span head, and
    for a text longer than the model's context."""
    if loaded.config.head.gives != "spans":
        raise RequestError(
            f"this model's head gives {loaded.config.head.gives}, and an answer is a span of a text; train a model "
            "with +spans",
            code="conflict", field="model", value=loaded.config.head.gives, expected="+spans",
        )  # fmt: skip
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise RequestError(
            "this checkpoint has no tokenizer, so it reads no text; put its tokenizer.json into the folder",
            code="missing", field="tokenizer", expected="a tokenizer.json",
        )  # fmt: skip
    for name, text in (("question", question), ("context", context)):
        utf8(text, f"the {name}")
        if not text.strip():
            raise RequestError(f"the {name} is empty; give a text", code="missing", field=name, value=text)
    row, segments = question_row(tokenizer, tokenizer.encode(question), tokenizer.encode(context))
    if len(row) > loaded.config.context:
        raise RequestError(
            f"question and text have {len(row):,} tokens, and this model reads {loaded.config.context:,}; give a "
            "shorter text",
            code="range", field="context", value=len(row), expected=f"at most {loaded.config.context:,} tokens",
        )  # fmt: skip
    first, last, probability = answer_span(loaded.model, row, segments, len(added_around(tokenizer)[1]))
    return Span(tokenizer.decode(row[first : last + 1].tolist()), probability)
