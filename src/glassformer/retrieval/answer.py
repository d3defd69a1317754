"""Answers to questions from an index: retrieve passages, put them before the question, generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import torch

from glassformer.errors import RequestError, check_whole, printable
from glassformer.figures import Markup, tag
from glassformer.figures.terminal import Printed
from glassformer.generation.session import Completion, Reply, Session
from glassformer.naming.chatting import loaded_as, split, state_dtype
from glassformer.naming.resolve import ModelLike, resolve
from glassformer.options import GenerationKeywords, GenerationOptions, ModelKeywords
from glassformer.retrieval.indexing import Found, Index
from glassformer.text.chat_template import ChatTemplate
from glassformer.text.documents import utf8
from glassformer.text.messages import chat_ids, quoted, quoting_ids
from glassformer.typed import typed

TASK = (
    "Answer the question from the passages below, and from nothing else. If they do not hold the answer, say that they "
    "do not."
)
PLAIN = "{task}\n\n{passages}\n\nQuestion: {question}\nAnswer:"
"""Prompt for a model without a chat template"""
LEAST = 16
"""Number of tokens below which a passage is left out instead of cut"""
LONGEST_STATE = 4096
"""Limit on the tokens of prompt and answer, also for a model with a longer context"""
EXCERPT = 100
"""Number of printed characters of a source"""


@dataclass(frozen=True, slots=True)
class Source:
    """A retrieved passage. `given` is the part of `text` that the model has read: shorter if the context was full, and
    empty if there was no room for it."""

    score: float
    document: str
    start: int
    text: str
    given: str


@dataclass(frozen=True)
class Answer(Printed):
    """An answer to a question, with the passages that the model has read."""

    question: str
    text: str
    sources: list[Source]
    """Retrieved passages, best first"""
    prompt_tokens: int
    """Number of tokens of the prompt."""
    tokens: int
    """Number of new tokens, including the one that ended the answer"""
    finish: str
    """Why generation ended: "stop" if the model ended its answer, "length" at `max_new_tokens`, "cancelled" if
    interrupted"""
    index: str
    """Folder of the index."""
    model: str
    """Name of the model; empty if it was given as an object"""

    def lines(self) -> Iterator[str]:
        """Yields the sources, then the answer."""
        yield from source_lines(self.sources)
        yield self.text

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values."""
        return asdict(self)

    def _repr_html_(self) -> str:
        names = (f"{one.document} at {one.start:,}" for one in self.sources)
        return tag("div", Markup(tag("p", self.text)), Markup(tag("ol", *(Markup(tag("li", one)) for one in names))))


class AnswerReply:
    """An answer during generation: its sources, and an iterator over its pieces of text."""

    def __init__(self, sources: list[Source], reply: Reply, answer: Callable[[Completion], Answer]):
        self.sources, self._reply, self._answer = sources, reply, answer

    def __iter__(self) -> Iterator[str]:
        """Yields pieces of text, each of whole characters, as they are generated."""
        return (piece.text for piece in self._reply if piece.text)

    def result(self) -> Answer:
        """Returns the answer once it is complete."""
        return self._answer(self._reply.result())

    def so_far(self) -> Answer:
        """Returns the answer up to now."""
        return self._answer(self._reply.so_far())


@dataclass
class Prompt:
    """Token ids for the model, and the sources with the part of each that fits."""

    ids: list[int]
    sources: list[Source] = field(default_factory=list)


@typed
def ask(
    question: str,
    index: str | Path | Index,
    model: ModelLike = "smollm2",
    *,
    k: int = 4,
    encoder: ModelLike | None = None,
    **options: Unpack[ModelKeywords],
) -> Answer:
    """Answers a question from the passages of an index that are nearest to it.

    Parameters
    ----------
    question
        The question. Passages that do not fit into the model's context with it and the answer are cut or left out,
        worst first.
    index
        A folder that `gf.index` made, or an open `Index`.
    model
        Decoder that answers, as `gf.load` takes it, or a loaded one.
    k
        Number of passages to retrieve.
    encoder
        Encoder of the index, if it is not at the place that the index names.
    **options
        Options of generation, as for `Loaded.generate` (by default the most likely tokens, at most 200), and of running
        the model: quantize, dtype, state_dtype, device, threads, compile (`ModelOptions`).

    Returns
    -------
    Answer
        Text and sources, which it prints. `Asker.submit` yields the text piece by piece.

    Raises
    ------
    RequestError
        For an index that is missing or damaged, a model that cannot answer, and a question without room for a passage.

    Examples
    --------
    >>> import glassformer as gf
    >>> gf.ask("How do I read a file line by line?", "docs.index").text  # doctest: +SKIP
    """
    opened = index if isinstance(index, Index) else Index(index, encoder)
    run, rest = split(options)
    name = str(model) if isinstance(model, str | Path) else ""
    asker = Asker(opened, loaded_as(model, run), state_dtype(run), name, compiled=run.compile)
    return asker.submit(question, k, **rest).result()


class Asker:
    """An index and the model that answers from it. `dtype` is the dtype of the decode state; None for the weights'
    dtype. `name` is the model's name in answers.

    >>> for piece in Asker(Index("docs.index"), "smollm2").submit("How do I read a file?"): print(piece, end="")
    """

    def __init__(
        self, index: Index, model: ModelLike, dtype: torch.dtype | None = None, name: str = "", compiled: bool = False
    ):
        self.index, self.name = index, name or (str(model) if isinstance(model, str | Path) else "")
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
        self.session = Session(self.loaded, slots=1, kept=0, dtype=dtype, compiled=compiled)

    def prompt(self, question: str, k: int = 4, max_new_tokens: int = 200) -> Prompt:
        """Retrieves the k best passages and returns the prompt, with as much of them as fits."""
        check_whole("max_new_tokens", max_new_tokens)
        if not question.strip():
            raise RequestError("the question is empty", code="missing", field="question", expected="a question")
        utf8(question, "the question")
        return self.fitted(question, self.index.search(question, k), self.context - max_new_tokens)

    def fitted(self, question: str, found: Sequence[Found], room: int) -> Prompt:
        """Returns the prompt of `found` and the question, in at most `room` tokens: passages are whole as long as they
        fit, the next one is cut, the others are left out."""
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
            spare -= len(ids) - room  # the text around the passages takes tokens as well

    def cut(self, text: str, room: int) -> tuple[str, int]:
        """Cuts a text to at most `room` tokens; returns (text, number of tokens), and ("", 0) if too little would be
        left to be useful."""
        ids = self.tokenizer.encode(text)
        if len(ids) <= room:
            return text, len(ids)
        if room < LEAST:
            return "", 0
        kept = self.tokenizer.decode(ids[:room]).rstrip("\ufffd").rstrip()
        return kept.rsplit(maxsplit=1)[0] if kept else "", room

    def ids(self, question: str, passages: Sequence[str]) -> list[int]:
        """Returns the token ids of the prompt made of passages and question."""
        numbered = "\n\n".join(f"[{i}] {text}" for i, text in enumerate(passages, 1))
        if self.template is None:
            text = PLAIN.format(task=TASK, passages=numbered, question=question)
            return quoting_ids(self.tokenizer, quoted(self.tokenizer, text), add_specials=True)
        asked = f"{numbered}\n\nQuestion: {question}"
        return chat_ids(
            self.tokenizer, self.template, [{"role": "system", "content": TASK}, {"role": "user", "content": asked}]
        )

    def submit(
        self, question: str, k: int = 4, options: GenerationOptions | None = None, **given: Unpack[GenerationKeywords]
    ) -> AnswerReply:
        """Returns a request for an answer from the k nearest passages; iterating over it computes the answer.

        `options` are as in `Session.submit`; by default the most likely tokens, at most 200. Raises RequestError,
        before anything is computed, for a question that cannot be answered."""
        defaults: GenerationKeywords = {"temperature": 0.0, "max_new_tokens": 200}
        options = self.session.options(**{**defaults, **given}) if options is None else options.replace(**given)
        prompt = self.prompt(question, k, options.max_new_tokens or 200)

        def answer(found: Completion) -> Answer:
            text, folder = found.text.strip(), str(self.index.folder)
            count, finish = len(found.tokens), found.finish_reason
            return Answer(question, text, prompt.sources, len(prompt.ids), count, finish, folder, self.name)

        return AnswerReply(prompt.sources, self.session.submit(prompt.ids, options), answer)


def source_lines(sources: Sequence[Source]) -> Iterator[str]:
    """Yields, for each source, a line with its score and place and a line with its first words; at the end an empty
    line."""
    for number, source in enumerate(sources, 1):
        words = printable(" ".join(source.text.split()))
        share = "" if source.given == source.text else " (cut)" if source.given else " (not given: no room)"
        yield f"[{number}] {source.score:.3f}  {printable(source.document)} at {source.start:,}{share}"
        yield f"    {words if len(words) <= EXCERPT else f'{words[:EXCERPT]}…'}"
    yield ""
