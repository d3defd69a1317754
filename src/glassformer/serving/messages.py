"""Bodies and answers of POST /v1/messages, in the format of Anthropic's API."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from glassformer.errors import RequestError, WorkError
from glassformer.serving.answering import Answering
from glassformer.serving.body import Body
from glassformer.serving.computing import ServedTask
from glassformer.serving.requests import (
    MOST_MESSAGES,
    MOST_TOKENS,
    ChatRequest,
    FunctionName,
    LongText,
    Name,
    Stop,
    with_fields,
)
from glassformer.serving.tools import Call
from glassformer.serving.wire import dumps, refusal
from glassformer.text.spelling import Spelling


class CacheControl(Body):
    """Mark of a prompt that will be sent again."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    """Text of a message."""

    type: Literal["text"]
    text: LongText
    cache_control: CacheControl | None = None
    """Without effect: prompts that start alike are recognised by their tokens."""
    citations: Annotated[list[None], Field(max_length=0)] | None = None


class ToolUseBlock(Body):
    """Call of a tool by the assistant."""

    type: Literal["tool_use"]
    id: Name
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Body):
    """Result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: LongText | Annotated[list[TextBlock], Field(max_length=1024)] | None = None
    is_error: bool | None = None
    """Without effect: the text of the result says what failed."""
    cache_control: CacheControl | None = None


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]
Text = LongText | Annotated[list[TextBlock], Field(max_length=1024)]


class Turn(Body):
    """A message of a chat."""

    role: Literal["user", "assistant"]
    content: LongText | Annotated[list[Block], Field(max_length=1024)]

    def plain(self) -> list[dict[str, Any]]:
        """Returns the message in OpenAI's form: results of calls become separate messages."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        found: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": one.tool_use_id, "content": text_of(one.content)}
            for one in self.content
            if isinstance(one, ToolResultBlock)
        ]
        calls = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": json.dumps(one.input)}}
            for one in self.content
            if isinstance(one, ToolUseBlock)
        ]
        text = "".join(one.text for one in self.content if isinstance(one, TextBlock))
        if text or calls or not found:
            found.append({"role": self.role, "content": text} | ({"tool_calls": calls} if calls else {}))
        return found


class ClientTool(Body):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: LongText | None = None
    """Text that the model reads."""
    input_schema: dict[str, Any]
    """JSON Schema of the input, which is enforced."""
    cache_control: CacheControl | None = None


class ToolUse(Body):
    """Choice of the tools that an answer calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    """Name of the tool, for the type tool."""
    disable_parallel_tool_use: bool | None = None
    """Allow one call at most."""


class Thinking(Body):
    """Reasoning before an answer, which cannot be asked for."""

    type: Literal["disabled"]


class Person(Body):
    """Facts about the user."""

    user_id: Name | None = None


class MessagesRequest(Body):
    """Body of POST /v1/messages."""

    model: Name
    """Name of a model, as GET /v1/models lists them."""
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    """Largest number of new tokens."""
    system: Text | None = None
    """Text of the system message."""
    stream: bool | None = None
    """Send the text as it is computed."""
    stop_sequences: Annotated[list[Stop], Field(max_length=16)] | None = None
    """Texts before which an answer ends."""
    temperature: Annotated[float | None, Field(ge=0, le=1)] = None
    """Sampling temperature; 0 takes the most likely token. By default as the model's folder says."""
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    """Nucleus sampling: smallest set of tokens with this total probability."""
    top_k: Annotated[int | None, Field(ge=1, le=1 << 20)] = None
    """Number of most likely tokens to draw from."""
    tools: Annotated[list[ClientTool], Field(max_length=128)] | None = None
    """Tools that the model may call."""
    tool_choice: ToolUse | None = None
    """Calls that the answer has."""
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 63)] = None
    """Seed of the draws (not in Anthropic's API)."""
    thinking: Thinking | None = None
    metadata: Person | None = None
    """Without effect."""
    service_tier: Literal["auto", "standard_only"] | None = None
    """Without effect."""

    def chat(self) -> ChatRequest:
        """Returns the request as a body of chat completions. Raises RequestError for fields that contradict."""
        messages = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        messages += [plain for turn in self.messages for plain in turn.plain()]
        found: dict[str, Any] = {"model": self.model, "messages": messages, "max_tokens": self.max_tokens}
        for name in ("stream", "temperature", "top_p", "top_k", "seed"):
            found[name] = getattr(self, name)
        found["stop"] = self.stop_sequences or None
        if self.tools:
            found["tools"] = [
                {
                    "type": "function",
                    "function": {"name": one.name, "description": one.description, "parameters": one.input_schema},
                }
                for one in self.tools
            ]
        if (choice := self.tool_choice) is not None:
            if (choice.type == "tool") != (choice.name is not None):
                raise RequestError("tool_choice of the type tool has a name", code="conflict", field="tool_choice.name")
            named = {"type": "function", "function": {"name": choice.name}}
            found["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
            if choice.disable_parallel_tool_use:
                found["parallel_tool_calls"] = False
        if self.metadata is not None and self.metadata.user_id is not None:
            found["metadata"] = {"user_id": self.metadata.user_id}
        if self.service_tier is not None:
            found["service_tier"] = "auto"
        return with_fields(ChatRequest, found)


class CountRequest(Body):
    """Body of POST /v1/messages/count_tokens."""

    model: Name
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: Text | None = None
    """Text of the system message."""
    tools: Annotated[list[ClientTool], Field(max_length=128)] | None = None
    """Tools that the model may call."""
    tool_choice: ToolUse | None = None
    """Calls that the answer has."""
    thinking: Thinking | None = None

    def chat(self) -> ChatRequest:
        """Returns the request as a body of chat completions. Raises RequestError for fields that contradict."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return MessagesRequest.model_construct(**fields, max_tokens=1).chat()


def text_of(given: str | Sequence[TextBlock] | None) -> str:
    """Returns a text, or the texts of blocks joined; empty for None."""
    return given if isinstance(given, str) else "".join(one.text for one in given or ())


KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error",
}  # fmt: skip
"""Types of errors in Anthropic's API, by status."""


def anthropic_error(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the body of an error in Anthropic's form."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


class MessageAnswering(Answering):
    """Answers of POST /v1/messages: one text."""

    def __init__(
        self, task: ServedTask, model: str, spelling: Spelling, given: ChatRequest, prompt: list[int], calls: bool
    ) -> None:
        super().__init__(task, spelling, given, [prompt], calls)
        self.model, self.id = model, f"msg_{secrets.token_hex(12)}"

    def _message(self, content: Sequence[Any], ended: bool) -> dict[str, Any]:
        reason, stop = self._reason() if ended else (None, None)
        usage = {"input_tokens": self.usage.prompt_tokens, "output_tokens": self.usage.completion_tokens}
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": list(content),
            "stop_reason": reason, "stop_sequence": stop, "usage": usage,
        }  # fmt: skip

    def _reason(self) -> tuple[str, str | None]:
        """Returns the fields stop_reason and stop_sequence of the answer."""
        assert self.task is not None
        stop = self.task.replies[0].stop
        finish = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}[self.finished[0]]
        return ("stop_sequence", stop) if stop is not None and finish == "end_turn" else (finish, None)

    async def whole(self) -> dict[str, Any]:
        """Returns the body of the whole answer. Raises WorkError for a failed text."""
        text, calls = "", list[Call]()
        async for grown in self.growth():
            for one in grown:
                text += one.text
                calls += one.calls
        content: list[Any] = [{"type": "text", "text": text}] if text or not calls else []
        return self._message(content + [_use(one) | {"input": json.loads(one.arguments)} for one in calls], True)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the server-sent events of a streamed answer, encoded."""
        block, inside = 0, False

        def stopped() -> bytes:
            return named("content_block_stop", index=block)

        try:
            yield named("message_start", message=self._message([], False))
            async for grown in self.growth():
                for one in grown:
                    if one.text and not inside:
                        yield named("content_block_start", index=block, content_block={"type": "text", "text": ""})
                        inside = True
                    if one.text:
                        yield named("content_block_delta", index=block, delta={"type": "text_delta", "text": one.text})
                    for call in one.calls:
                        if inside:
                            yield stopped()
                            block, inside = block + 1, False
                        yield named("content_block_start", index=block, content_block=_use(call) | {"input": {}})
                        delta = {"type": "input_json_delta", "partial_json": call.arguments}
                        yield named("content_block_delta", index=block, delta=delta)
                        yield stopped()
                        block += 1
            if inside:
                yield stopped()
            reason, stop = self._reason()
            usage = {"output_tokens": self.usage.completion_tokens}
            yield named("message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=usage)
            yield named("message_stop")
        except WorkError as problem:
            status, body = refusal(problem)
            yield named("error", error=anthropic_error(status, body)["error"])
        finally:
            if self.task is not None:
                self.task.cancel()


def _use(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id.replace("call_", "toolu_"), "name": call.name}


def named(kind: str, **fields: Any) -> bytes:
    """Returns a server-sent event called `kind`, whose data are `fields` and the type `kind`."""
    return f"event: {kind}\ndata: {dumps({'type': kind, **fields})}\n\n".encode()
