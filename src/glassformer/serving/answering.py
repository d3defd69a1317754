"""The answer to one request for text, whole or as a stream.

Growth        new characters and tokens of a text
Answering     texts of a request as they are computed; formats subclass it
Completing    answers in the two formats of OpenAI that have choices
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from glassformer.errors import WorkError
from glassformer.generation.prompt_scores import PromptScores
from glassformer.serving.answers import AnswerFormat, CompletionFormat, Usage, joined
from glassformer.serving.computing import ServedTask, failure_of
from glassformer.serving.entries import Entries, SpelledToken
from glassformer.serving.inside import Insight
from glassformer.serving.requests import CompletionRequest, TextRequest
from glassformer.serving.streams import EventStream, Json, unless_gone
from glassformer.serving.tools import Call, CallReader
from glassformer.serving.wire import event, refusal
from glassformer.text.spelling import Spelling


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Returns the header x-glassformer-ignored, which lists fields without effect, as {name: value}; {} without
    fields."""
    return {"x-glassformer-ignored": ", ".join(names)} if names else {}


@dataclass
class Growth:
    """New characters and tokens of one text, since the last growth of the same text."""

    index: int
    text: str
    tokens: list[SpelledToken]
    calls: list[Call] = field(default_factory=list)
    end: bool = False
    """True for the last growth of the text."""
    inside: list[dict[str, Any]] = field(default_factory=list)
    """Values inside the model for each new token; empty unless asked for."""


class Answering:
    """Answer to one request for text, sent whole or as a stream while its texts are computed."""

    def __init__(
        self,
        task: ServedTask | None,
        spelling: Spelling,
        given: TextRequest,
        prompts: Sequence[list[int]],
        calls: bool = False,
    ) -> None:
        self.task, self.spelling, self.given, self.prompts = task, spelling, given, prompts
        self.texts = len(prompts) * (given.n or 1)
        self.usage = Usage(sum(map(len, prompts)))
        self.readers = [CallReader() if calls else None for _ in range(self.texts)]
        self.insight: Insight | None = None
        self.finished: dict[int, str] = {}
        """Reason of the end of each text: stop, length or tool_calls."""

    async def response(self, request: Request) -> Response:
        """Returns the answer, whole or as a stream. Raises Gone if the client closes its connection first."""
        headers = ignored_header(self.given.ignored())
        if self.given.stream:
            return EventStream(self.events(), headers)
        try:
            return Json(await unless_gone(self.whole(), request.receive), headers=headers)
        finally:
            if self.task is not None:
                self.task.cancel()

    async def whole(self) -> dict[str, Any]:
        """Returns the body of the whole answer. Raises WorkError for a failed text."""
        raise NotImplementedError

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the server-sent events of a streamed answer, encoded."""
        raise NotImplementedError

    async def growth(self) -> AsyncIterator[list[Growth]]:
        """Yields lists of the growth of the texts, as it is computed. Raises WorkError for a failed text."""
        if self.task is None:
            return
        entries = [Entries(self.spelling, reply.ends) for reply in self.task.replies]
        seen = 0
        async for some in self.task.pieces():
            grown = []
            for index, piece in some:
                reader = self.readers[index]
                if piece is not None:
                    self.usage.completion_tokens += piece.id is not None
                    text, calls = (piece.text, []) if reader is None else reader.feed(piece.text)
                    grown.append(Growth(index, text, entries[index].add(piece), calls))
                    if self.insight is not None and piece.id is not None:
                        grown[-1].inside.append(self.insight.tokens[seen])
                        seen += 1
                    continue
                found = self.task.replies[index].so_far()
                if problem := failure_of(found):
                    raise WorkError(str(problem), code="failed")
                called = reader is not None and reader.count > 0 and found.finish_reason == "stop"
                self.finished[index] = "tool_calls" if called else found.finish_reason
                rest = "" if reader is None else reader.close()
                grown.append(Growth(index, rest, entries[index].close(), end=True))
            yield grown


class Completing(Answering):
    """Answers of POST /v1/chat/completions and POST /v1/completions."""

    def __init__(
        self,
        task: ServedTask | None,
        form: AnswerFormat,
        given: TextRequest,
        prompts: Sequence[list[int]],
        calls: bool = False,
    ) -> None:
        super().__init__(task, form.spelling, given, prompts, calls)
        self.form = form
        self.scores: Sequence[PromptScores] = []
        self.echoed: list[str] = []

    def echo(self) -> None:
        """Decodes the prompts to text, for a completion with `echo`, which repeats them."""
        tokenizer = self.spelling.tokenizer
        given = self.given.prompts() if isinstance(self.given, CompletionRequest) else []
        self.echoed = [one if isinstance(one, str) else tokenizer.decode(one) for one in given]

    def _begun(self, index: int) -> tuple[str, dict[str, Any] | None]:
        """Returns the prompt that precedes text `index`, and its log-probabilities; "" and None without `echo`."""
        prompt = index // (self.given.n or 1)
        text = self.echoed[prompt] if self.echoed else ""
        scores = self.scores[prompt] if self.scores else None
        if isinstance(self.form, CompletionFormat) and scores is not None:
            return text, self.form.echoed(index, self.prompts[prompt], scores)
        if isinstance(self.form, CompletionFormat) and index not in self.form.offsets:
            self.form.offsets[index] = len(text)
        return text, None

    async def whole(self) -> dict[str, Any]:
        """Returns the body of the whole answer. Raises WorkError for a failed text."""
        every = [Growth(index, "", []) for index in range(self.texts)]
        async for grown in self.growth():
            for one in grown:
                every[one.index].text += one.text
                every[one.index].tokens += one.tokens
                every[one.index].calls += one.calls
                every[one.index].inside += one.inside
        choices = []
        for index, one in enumerate(every):
            prompt, scored = self._begun(index)
            only = bool(self.scores and self.scores[0].only)
            choice = self.form.choice(index, one.text, one.tokens, self.finished.get(index, "length"), one.calls)
            if "text" in choice:
                choice |= {"text": prompt + choice["text"], "logprobs": joined([scored, choice["logprobs"]])}
                assert not only or not one.text
            choices.append(choice | ({} if self.insight is None else {"glass": one.inside}))
        return self.form.body(choices, self.usage)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the server-sent events of a streamed answer, encoded."""
        wanted = self.given.stream_options
        each = bool(wanted and wanted.continuous_usage_stats)
        shown = each or bool(wanted and wanted.include_usage)

        def chunk(*choices: dict[str, Any]) -> bytes:
            return event(self.form.chunk(choices, self.usage if each else None, shown))

        try:
            begun = set[int]()

            def first(index: int) -> list[bytes]:
                if index in begun:
                    return []
                begun.add(index)
                if (opened := self.form.begun(index)) is not None:
                    return [chunk(opened)]
                prompt, scored = self._begun(index)
                choice = self.form.delta(index, prompt, [], None)
                return [chunk(choice | {"logprobs": scored})] if prompt else []

            if not self.scores:
                for index in range(self.texts):
                    for opening in first(index):
                        yield opening
            held: dict[int, list[SpelledToken]] = {index: [] for index in range(self.texts)}
            inside = list[dict[str, Any]]()
            called = dict.fromkeys(range(self.texts), 0)
            async for grown in self.growth():
                for one in grown:
                    index = one.index
                    for opening in first(index):
                        yield opening
                    held[index] += one.tokens
                    inside += one.inside
                    if one.text or (one.end and (held[index] or inside)):
                        delta = self.form.delta(index, one.text, held[index], None)
                        yield chunk(delta | ({} if self.insight is None else {"glass": inside}))
                        held[index], inside = [], []
                    for call in one.calls:
                        yield chunk(self.form.called(index, called[index], call))
                        called[index] += 1
                    if one.end:
                        yield chunk(self.form.delta(index, "", [], self.finished[index]))
            if self.task is None:
                for index in range(self.texts):
                    yield chunk(self.form.delta(index, "", [], "length"))
            if wanted and wanted.include_usage:
                yield event(self.form.chunk([], self.usage, True))
            yield event("[DONE]")
        except WorkError as problem:
            yield event(refusal(problem)[1])
        finally:
            if self.task is not None:
                self.task.cancel()
