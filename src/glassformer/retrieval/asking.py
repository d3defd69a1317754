"""Questions answered from an index: retrieve, put the passages before the question, generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from glassformer.errors import RequestError, check_whole
from glassformer.generation.session import Reply, Session
from glassformer.naming.resolve import ModelLike, resolve
from glassformer.retrieval.indexing import Found, Index
from glassformer.text import Tokenizer
from glassformer.text.chat import ChatTemplate
from glassformer.text.documents import utf8
from glassformer.text.subword import FileTokenizer

TASK = (
    "Answer the question from the passages below, and from nothing else. If they do not hold the answer, say that they "
    "do not."
)
PLAIN = "{task}\n\n{passages}\n\nQuestion: {question}\nAnswer:"
"""The prompt of a model without a chat template."""
LEAST = 16
"""Tokens of a passage below which it is left out instead of cut."""
LONGEST_STATE = 4096
"""Tokens of prompt and answer, at most, whatever the model's context."""


@dataclass(frozen=True, slots=True)
class Source:
    """A passage that was retrieved. `given` is what of its text the model has read: it is shorter where the context
    ended, and empty where there was no room at all."""

    score: float
    document: str
    start: int
    text: str
    given: str


@dataclass(frozen=True)
class Answer:
    """`text`, drawn from `sources`, the best first."""

    question: str
    text: str
    sources: list[Source]
    prompt_tokens: int
    tokens: int
    """Number of new tokens, with the one that ended the answer."""
    finish: str
    """stop if the model ended its answer, length at `max_new_tokens`, cancelled if it was interrupted."""


@dataclass
class Prompt:
    """What the model reads, and what it has of each source."""

    ids: list[int]
    sources: list[Source] = field(default_factory=list)


def ask(
    question: str,
    index: str | Path | Index,
    model: ModelLike = "smollm2",
    k: int = 4,
    max_new_tokens: int = 200,
    on_text: Callable[[str], None] | None = None,
    **sampling: Any,
) -> Answer:
    """Answers a question from the k passages of an index that are nearest to it.

    Passages that do not fit into the model's context beside the question and `max_new_tokens` are cut or left out, the
    worst first; `answer.sources` says what was given. `on_text` is called with each piece of the answer as it comes.
    `sampling` is as for `generate` (temperature, seed, ...). Raises RequestError as `Index` and `generate` do, and for
    a question that leaves no room for a passage.

    >>> gf.ask("How do I read a file line by line?", "docs.index").text
    """
    asker = Asker(index if isinstance(index, Index) else Index(index), model)
    prompt = asker.prompt(question, k, max_new_tokens)
    pieces = asker.stream(prompt, max_new_tokens, **sampling)
    for piece in pieces:
        if on_text is not None:
            on_text(piece)
    return asker.answer(question, prompt)


class Asker:
    """An index and the model that answers from it. `dtype` is that of the decode state; None for the weights' dtype."""

    def __init__(self, index: Index, model: ModelLike, dtype: torch.dtype | None = None):
        self.index = index
        self.loaded = resolve(model, weights=True)
        if self.loaded.tokenizer is None or self.loaded.config.encoder is not None or not self.loaded.model.writes:
            raise RequestError(
                "this model cannot answer: it has no tokenizer, or does not write from left to right; give a decoder "
                "such as smollm2",
                code="conflict", field="model", expected="a decoder with a tokenizer",
            )  # fmt: skip
        self.tokenizer: Any = self.loaded.tokenizer
        self.template = ChatTemplate.of(self.tokenizer)
        self.context = min(self.loaded.config.context, LONGEST_STATE)
        self.specials = special_texts(self.tokenizer)
        self.session = Session(self.loaded, slots=1, kept=0, dtype=dtype)
        self.reply: Reply | None = None
        """The answer that was streamed last."""

    def prompt(self, question: str, k: int = 4, max_new_tokens: int = 200) -> Prompt:
        """The tokens of the prompt, with as much of the k best passages as there is room for."""
        check_whole("max_new_tokens", max_new_tokens)
        if not question.strip():
            raise RequestError("the question is empty", code="missing", field="question", expected="a question")
        utf8(question, "the question")
        return self.fitted(question, self.index.search(question, k), self.context - max_new_tokens)

    def fitted(self, question: str, found: Sequence[Found], room: int) -> Prompt:
        """`found` before the question in at most `room` tokens: whole as long as they fit, the next one cut, the rest
        left out."""
        empty = [Source(one.score, one.passage.document, one.passage.start, one.passage.text, "") for one in found]
        bare = len(self.ids(question, []))
        if bare + LEAST > room:
            raise RequestError(
                f"the question takes {bare} tokens of the {max(room, 0)} that the model can read before its answer, "
                "which leaves no room for a passage; ask for a shorter answer, or use a model of a longer context",
                code="range", field="question", value=bare, expected=f"at most {max(room - LEAST, 0)} tokens",
            )  # fmt: skip
        spare = room - bare
        while True:
            sources, left = [], spare
            for one in empty:
                given, tokens = self.cut(one.text, left)
                sources.append(replace(one, given=given))
                left = left - tokens if given == one.text else 0
            ids = self.ids(question, [one.given for one in sources if one.given])
            if len(ids) <= room:
                return Prompt(ids, sources)
            spare -= len(ids) - room  # what stands around the passages takes tokens too

    def cut(self, text: str, room: int) -> tuple[str, int]:
        """(as much of a text as has at most so many tokens, their number); nothing where that is too little to read."""
        ids = self.tokenizer.encode(text)
        if len(ids) <= room:
            return text, len(ids)
        if room < LEAST:
            return "", 0
        kept = self.tokenizer.decode(ids[:room]).rstrip("\ufffd").rstrip()
        return kept.rsplit(maxsplit=1)[0] if kept else "", room

    def ids(self, question: str, passages: Sequence[str]) -> list[int]:
        """The prompt's tokens."""
        numbered = "\n\n".join(f"[{i}] {self.quoted(text)}" for i, text in enumerate(passages, 1))
        question = self.quoted(question)
        if self.template is None:
            text = PLAIN.format(task=TASK, passages=numbered, question=question)
            return self.tokenizer.encode(text).tolist()
        asked = f"{numbered}\n\nQuestion: {question}"
        text = self.template.render([{"role": "system", "content": TASK}, {"role": "user", "content": asked}])
        return self.tokenizer.encode(text, parse_specials=True).tolist()

    def quoted(self, text: str) -> str:
        """A stranger's text, in which no special token is spelled: a passage cannot end the turn that it stands in."""
        for special in self.specials:
            text = text.replace(special, f"{special[0]} {special[1:]}")
        return text

    def stream(self, prompt: Prompt, max_new_tokens: int = 200, **sampling: Any) -> Iterator[str]:
        """Yields the answer in pieces of whole characters, the most likely tokens unless `sampling` says otherwise."""
        sampling = {"temperature": 0.0, **sampling}
        self.reply = self.session.submit(prompt.ids, max_new_tokens=max_new_tokens, **sampling)
        for piece in self.reply:
            if piece.text:
                yield piece.text

    def answer(self, question: str, prompt: Prompt) -> Answer:
        """Returns the text that was streamed last, as far as it came, with its sources."""
        assert self.reply is not None, "stream it first"
        found = self.reply.so_far()
        read, new = len(prompt.ids), len(found.tokens)
        return Answer(question, found.text.strip(), prompt.sources, read, new, found.finish_reason)


def special_texts(tokenizer: Tokenizer) -> list[str]:
    """The special tokens of a tokenizer's file as they are spelled, the longest first."""
    if not isinstance(tokenizer, FileTokenizer):
        return []
    found = [text for text, i in tokenizer.ids().items() if i in tokenizer.special_ids and len(text) > 1]
    return sorted(found, key=len, reverse=True)
