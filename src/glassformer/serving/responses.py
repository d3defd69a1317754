"""Bodies and answers of POST /v1/responses: OpenAI's newer format, without a store of earlier answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from glassformer.errors import WorkError
from glassformer.options import GenerationOptions
from glassformer.serving.answering import Answering
from glassformer.serving.body import Body
from glassformer.serving.computing import ServedTask
from glassformer.serving.entries import SpelledToken, bounded_logprob
from glassformer.serving.messages import named
from glassformer.serving.requests import (
    MOST_MESSAGES,
    ChatRequest,
    FunctionName,
    JsonFormat,
    Labels,
    LongText,
    Name,
    TextFormat,
    Whole,
    with_fields,
)
from glassformer.serving.tools import Call
from glassformer.serving.wire import refusal
from glassformer.text.spelling import Spelling


class InputText(Body):
    """Text of an item."""

    type: Literal["input_text", "output_text", "text"]
    text: LongText
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


class InputItem(Body):
    """Entry of a conversation."""

    id: Name | None = None
    """Without effect."""
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    """Without effect."""


class InputMessage(InputItem):
    """Message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: LongText | Annotated[list[InputText], Field(max_length=1024)]
    phase: Literal["commentary", "final_answer"] | None = None
    """Without effect: chat templates show no phases."""


class InputCall(InputItem):
    """Call of a function that the model made."""

    type: Literal["function_call"]
    call_id: Name
    name: FunctionName
    arguments: LongText


class InputResult(InputItem):
    """Result of a call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: LongText | Annotated[list[InputText], Field(max_length=1024)]


class FlatTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: LongText | None = None
    """Text that the model reads."""
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments, which is enforced."""
    strict: bool | None = None
    """Every schema is enforced, with or without it."""


class FlatChoice(Body):
    """Choice of the one function that an answer must call."""

    type: Literal["function"]
    name: FunctionName


class FlatSchema(Body):
    """Format of an answer: JSON that matches a schema."""

    type: Literal["json_schema"]
    name: FunctionName
    description: LongText | None = None
    """Without effect: the model does not read it."""
    schema_: dict[str, Any] = Field(alias="schema")
    """JSON Schema. Keywords that cannot be enforced are refused."""
    strict: bool | None = None
    """Every schema is enforced, with or without it."""


class TextSettings(Body):
    """Format of a text."""

    format: Annotated[TextFormat | JsonFormat | FlatSchema, Field(discriminator="type")] | None = None
    """Format that the answer is held to."""
    verbosity: None = None


class ResponsesRequest(Body):
    """Body of POST /v1/responses."""

    model: Name
    """Name of a model, as GET /v1/models lists them."""
    input: (
        LongText
        | Annotated[list[InputMessage | InputCall | InputResult], Field(min_length=1, max_length=MOST_MESSAGES)]
    )
    """A text of the user, or the items of a conversation."""
    instructions: LongText | None = None
    """Text of the system message."""
    max_output_tokens: Whole = None
    """Largest number of new tokens; by default up to the end of the context."""
    stream: bool | None = None
    """Send the text as it is computed."""
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    """Sampling temperature; 0 takes the most likely token. By default as the model's folder says."""
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    """Nucleus sampling: smallest set of tokens with this total probability."""
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 63)] = None
    """Seed of the draws (not in OpenAI's API)."""
    text: TextSettings | None = None
    """Format of the answer."""
    tools: Annotated[list[FlatTool], Field(max_length=128)] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    """Calls that the answer has: none, those that the model makes, at least one, or one of the named function."""
    parallel_tool_calls: bool | None = None
    """Allow several calls in an answer, 8 at most; true by default."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    """Number of most likely tokens that are reported at each position, with include."""
    include: Annotated[list[Literal["message.output_text.logprobs"]], Field(max_length=8)] | None = None
    """Further contents of the answer."""
    store: Literal[False] | None = None
    """Nothing is stored."""
    previous_response_id: None = None
    """Send the whole conversation: nothing is stored."""
    truncation: Literal["disabled"] | None = None
    """No prompt is cut."""
    background: Literal[False] | None = None
    metadata: Labels | None = None
    """Returned with the answer."""
    user: Name | None = None
    """Without effect."""
    safety_identifier: Name | None = None
    """Without effect."""
    prompt_cache_key: Name | None = None
    """Without effect: prompts that start alike are recognised by their tokens."""
    service_tier: Literal["auto", "default"] | None = None
    """Without effect."""
    reasoning: None = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None

    def _messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self.instructions:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        for one in self.input:
            if isinstance(one, InputMessage):
                found.append({"role": one.role, "content": _joined(one.content)})
            elif isinstance(one, InputResult):
                found.append({"role": "tool", "tool_call_id": one.call_id, "content": _joined(one.output)})
            else:
                function = {"name": one.name, "arguments": one.arguments}
                call = {"id": one.call_id, "type": "function", "function": function}
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": None, "tool_calls": []})
                found[-1].setdefault("tool_calls", []).append(call)
        return found

    def chat(self) -> ChatRequest:
        """Returns the request in the format of chat completions. Raises RequestError for fields that it refuses."""
        found: dict[str, Any] = {"messages": self._messages(), "max_tokens": self.max_output_tokens}
        for name in ("model", "stream", "temperature", "top_p", "seed", "parallel_tool_calls", "user",
                     "safety_identifier", "prompt_cache_key", "service_tier"):  # fmt: skip
            found[name] = getattr(self, name)
        if self.tools:
            found["tools"] = [
                {"type": "function", "function": one.model_dump(exclude={"type"}, exclude_none=True)}
                for one in self.tools
            ]
        choice = self.tool_choice
        found["tool_choice"] = (
            {"type": "function", "function": {"name": choice.name}} if isinstance(choice, FlatChoice) else choice
        )
        if self.text is not None and self.text.format is not None:
            given = self.text.format.model_dump(by_alias=True, exclude_none=True)
            schema = {key: value for key, value in given.items() if key != "type"}
            found["response_format"] = {"type": given["type"]} | ({"json_schema": schema} if schema else {})
        if self.include:
            found |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        elif self.top_logprobs:
            found |= {"top_logprobs": self.top_logprobs}  # refused there
        return with_fields(ChatRequest, found)


def _joined(given: str | Sequence[InputText]) -> str:
    return given if isinstance(given, str) else "".join(one.text for one in given)


class ResponseAnswering(Answering):
    """Answers of POST /v1/responses: one text."""

    def __init__(
        self, task: ServedTask, asked: ResponsesRequest, spelling: Spelling, given: ChatRequest, prompt: list[int],
        calls: bool, options: GenerationOptions,
    ) -> None:  # fmt: skip
        super().__init__(task, spelling, given, [prompt], calls)
        self.asked, self.options, self.created = asked, options, int(time.time())
        self.id, self.message = f"resp_{secrets.token_hex(12)}", f"msg_{secrets.token_hex(12)}"
        self.number = -1

    def _body(self, output: Sequence[Any], status: str) -> dict[str, Any]:
        asked, ended = self.asked, status != "in_progress"
        text = {"format": {"type": "text"}} if asked.text is None or asked.text.format is None else {
            "format": asked.text.format.model_dump(by_alias=True)
        }  # fmt: skip
        choice = asked.tool_choice
        usage = {
            "input_tokens": self.usage.prompt_tokens, "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": self.usage.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.usage.prompt_tokens + self.usage.completion_tokens,
        }  # fmt: skip
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": None, "model": asked.model, "instructions": asked.instructions, "output": list(output),
            "max_output_tokens": asked.max_output_tokens, "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "store": False,
            "temperature": self.options.temperature, "top_p": self.options.top_p or 1.0,
            "top_logprobs": asked.top_logprobs or 0,
            "text": text, "tools": [one.model_dump() for one in asked.tools or ()],
            "tool_choice": choice.model_dump() if isinstance(choice, FlatChoice) else choice or "auto",
            "truncation": "disabled", "usage": usage if ended else None, "user": asked.user,
            "metadata": asked.metadata or {}, "background": False, "service_tier": "default",
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tool_calls": None,
            "safety_identifier": asked.safety_identifier, "prompt_cache_key": asked.prompt_cache_key,
        }  # fmt: skip

    def _message(self, text: str, tokens: Sequence[SpelledToken], status: str) -> dict[str, Any]:
        content = [self._part(text, tokens)] if status != "in_progress" else []
        return {"type": "message", "id": self.message, "status": status, "role": "assistant", "content": content}

    def _part(self, text: str, tokens: Sequence[SpelledToken]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: Sequence[SpelledToken]) -> list[Any]:
        if not self.asked.include:
            return []
        spelling = self.spelling
        return [
            {
                "token": one.text, "logprob": one.logprob, "bytes": list(one.bytes),
                "top_logprobs": [
                    {"token": spelling.text(i), "logprob": bounded_logprob(value), "bytes": list(spelling.bytes(i))}
                    for i, value in one.top.items()
                ],
            }
            for one in tokens
        ]  # fmt: skip

    @property
    def _status(self) -> str:
        return "incomplete" if self.finished[0] == "length" else "completed"

    async def whole(self) -> dict[str, Any]:
        """Returns the body of the whole answer. Raises WorkError for a failed text."""
        text, tokens, calls = "", list[SpelledToken](), list[Call]()
        async for grown in self.growth():
            for one in grown:
                text += one.text
                tokens += one.tokens
                calls += one.calls
        message = [self._message(text, tokens, self._status)] if text or not calls else []
        return self._body([*message, *map(_call, calls)], self._status)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self.number += 1
        return named(kind, sequence_number=self.number, **fields)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the server-sent events of a streamed answer, encoded."""
        output, text, tokens = list[Any](), "", list[SpelledToken]()
        inside = False
        place: dict[str, Any] = {"item_id": self.message, "output_index": 0, "content_index": 0}

        def closed(status: str) -> list[bytes]:
            part = self._part(text, tokens)
            output.append(self._message(text, tokens, status))
            return [
                self._event("response.output_text.done", **place, text=text, logprobs=part["logprobs"]),
                self._event("response.content_part.done", **place, part=part),
                self._event("response.output_item.done", output_index=place["output_index"], item=output[-1]),
            ]

        def opened() -> list[bytes]:
            place["output_index"] = len(output)
            message = self._message("", [], "in_progress")
            return [
                self._event("response.output_item.added", output_index=len(output), item=message),
                self._event("response.content_part.added", **place, part=self._part("", [])),
            ]

        try:
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self._body([], "in_progress"))
            async for grown in self.growth():
                for one in grown:
                    if one.text and not inside:
                        for event in opened():
                            yield event
                        inside = True
                    text, tokens = text + one.text, tokens + one.tokens
                    if one.text:
                        logprobs = self._logprobs(one.tokens)
                        yield self._event("response.output_text.delta", **place, delta=one.text, logprobs=logprobs)
                    for call in one.calls:
                        if inside:
                            for event in closed("completed"):
                                yield event
                            inside = False
                        for event in self._call_events(call, len(output)):
                            yield event
                        output.append(_call(call))
            if not inside and not output:
                inside = True
                for event in opened():
                    yield event
            if inside:
                for event in closed(self._status):
                    yield event
            yield self._event(f"response.{self._status}", response=self._body(output, self._status))
        except WorkError as problem:
            error = refusal(problem)[1]["error"]
            failed = self._body(output, "failed") | {"error": {"code": "server_error", "message": error["message"]}}
            yield self._event("response.failed", response=failed)
        finally:
            if self.task is not None:
                self.task.cancel()

    def _call_events(self, call: Call, index: int) -> list[bytes]:
        whole = _call(call)
        place: dict[str, Any] = {"item_id": whole["id"], "output_index": index}
        begun = whole | {"status": "in_progress", "arguments": ""}
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event(
                "response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments
            ),
            self._event("response.output_item.done", output_index=index, item=whole),
        ]  # fmt: skip


def _call(call: Call) -> dict[str, Any]:
    return {
        "type": "function_call", "id": call.id.replace("call_", "fc_"), "call_id": call.id, "name": call.name,
        "arguments": call.arguments, "status": "completed",
    }  # fmt: skip
