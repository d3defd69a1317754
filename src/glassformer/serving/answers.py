"""Bodies of answers in OpenAI's formats."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glassformer.generation.prompt_scores import PromptScores
from glassformer.serving.entries import SpelledToken, bounded_logprob
from glassformer.serving.tools import Call
from glassformer.text.spelling import Spelling


@dataclass
class Usage:
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int = 0

    def body(self) -> dict[str, int]:
        """Returns the counts with their sum."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total,
        }  # fmt: skip


@dataclass
class AnswerFormat:
    """Form of the answers to one request."""

    model: str
    fingerprint: str
    spelling: Spelling
    logprobs: bool
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    OBJECT = PREFIX = CHUNK = ""

    def __post_init__(self) -> None:
        self.id = self.id or f"{self.PREFIX}-{secrets.token_hex(12)}"

    def body(self, choices: Sequence[Any], usage: Usage | None) -> dict[str, Any]:
        """Returns the body of a whole answer with `choices`, and with the counts of tokens if given."""
        return self._head(self.OBJECT, choices) | ({"usage": usage.body()} if usage else {})

    def chunk(self, choices: Sequence[Any], usage: Usage | None = None, shown: bool = False) -> dict[str, Any]:
        """Returns the body of a chunk of a stream; if `shown`, it has the field `usage`, null without counts."""
        counts = {"usage": usage.body() if usage else None} if usage or shown else {}
        return self._head(self.CHUNK, choices) | counts

    def _head(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": list(choices),
        }  # fmt: skip

    def choice(
        self,
        index: int,
        text: str,
        entries: Sequence[SpelledToken],
        finish: str | None,
        calls: Sequence[Call] = (),
    ) -> dict[str, Any]:
        """Returns the entry of text `index` in `choices` of a whole answer."""
        raise NotImplementedError

    def called(self, index: int, number: int, call: Call) -> dict[str, Any]:
        """Returns the entry of text `index` in a chunk, which grows by a call; `number` is the index of the call."""
        raise NotImplementedError

    def begun(self, index: int) -> dict[str, Any] | None:
        """Returns the entry that starts text `index` in a stream; None if the format needs no such entry."""
        return None

    def delta(self, index: int, text: str, entries: Sequence[SpelledToken], finish: str | None) -> dict[str, Any]:
        """Returns the entry of text `index` in a chunk, which grows by `text`."""
        return self.choice(index, text, entries, finish)


class ChatFormat(AnswerFormat):
    """Answers of POST /v1/chat/completions."""

    OBJECT, CHUNK, PREFIX = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(
        self,
        index: int,
        text: str,
        entries: Sequence[SpelledToken],
        finish: str | None,
        calls: Sequence[Call] = (),
    ) -> dict[str, Any]:
        """Returns the entry of `choices` with message `index` of a whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if calls:
            message |= {"content": text or None, "tool_calls": [_call(one) for one in calls]}
        return {"index": index, "message": message, "logprobs": self._logprobs(entries), "finish_reason": finish}

    def begun(self, index: int) -> dict[str, Any]:
        """Returns the entry that starts message `index` in a stream: it names the role."""
        return {
            "index": index, "delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None,
            "finish_reason": None,
        }  # fmt: skip

    def delta(self, index: int, text: str, entries: Sequence[SpelledToken], finish: str | None) -> dict[str, Any]:
        """Returns the entry of message `index` in a chunk, which grows by `text`; the last entry has no growth."""
        delta = {"content": text} if text or finish is None else {}
        return {
            "index": index, "delta": delta, "logprobs": self._logprobs(entries) if entries else None,
            "finish_reason": finish,
        }  # fmt: skip

    def called(self, index: int, number: int, call: Call) -> dict[str, Any]:
        """Returns the entry of message `index` in a chunk, which grows by a call."""
        delta = {"tool_calls": [{"index": number, **_call(call)}]}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, entries: Sequence[SpelledToken]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return {"content": [self._entry(one) for one in entries], "refusal": None}

    def _entry(self, one: SpelledToken) -> dict[str, Any]:
        top = [
            {
                "token": self.spelling.text(token),
                "logprob": bounded_logprob(logprob),
                "bytes": list(self.spelling.bytes(token)),
            }
            for token, logprob in one.top.items()
        ]
        return {"token": one.text, "logprob": one.logprob, "bytes": list(one.bytes), "top_logprobs": top}


@dataclass
class CompletionFormat(AnswerFormat):
    """Answers of POST /v1/completions."""

    offsets: dict[int, int] = field(default_factory=dict)
    """Characters of each text so far."""

    OBJECT = CHUNK = "text_completion"
    PREFIX = "cmpl"

    def choice(
        self,
        index: int,
        text: str,
        entries: Sequence[SpelledToken],
        finish: str | None,
        calls: Sequence[Call] = (),
    ) -> dict[str, Any]:
        """Returns the entry of text `index` in `choices`, of a whole answer or a chunk."""
        logprobs = self._logprobs(index, entries) if self.logprobs and entries else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, index: int, entries: Sequence[SpelledToken]) -> dict[str, Any]:
        offset, offsets = self.offsets.get(index, 0), []
        for one in entries:
            offsets.append(offset)
            offset += len(one.text)
        self.offsets[index] = offset
        return {
            "tokens": [one.text for one in entries],
            "token_logprobs": [one.logprob for one in entries],
            "top_logprobs": [self._top(one.top) for one in entries],
            "text_offset": offsets,
        }

    def _top(self, top: Mapping[int, float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, logprob in top.items():
            found.setdefault(self.spelling.text(token), bounded_logprob(logprob))
        return found

    def echoed(self, index: int, ids: Sequence[int], scores: PromptScores | None) -> dict[str, Any] | None:
        """Returns the log-probabilities of an echoed prompt, null for its first token; None unless they were asked
        for."""
        if scores is None:
            return None
        top = scores.top_logprobs or [{} for _ in scores.logprobs]
        entries = [
            SpelledToken(token, self.spelling.bytes(token), logprob, best)
            for token, logprob, best in zip(ids, [0.0, *map(bounded_logprob, scores.logprobs)], [{}, *top], strict=True)
        ]
        found = self._logprobs(index, entries)
        found["token_logprobs"][0] = found["top_logprobs"][0] = None
        return found


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def joined(parts: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Returns the log-probabilities of a text, joined from those of its parts; None without any."""
    some = [part for part in parts if part]
    return {key: [one for part in some for one in part[key]] for key in some[0]} if some else None
