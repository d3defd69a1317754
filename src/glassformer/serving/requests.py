"""Bodies of requests. A field is obeyed, or reported as without effect, or refused; no field is dropped in silence."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, ValidationError

from glassformer.errors import RequestError
from glassformer.generation.grammar import LONGEST, Kind
from glassformer.serving.body import Body, wrong_field
from glassformer.serving.inside import Inside
from glassformer.serving.tools import MOST_CALLS, call_grammar

MOST_TEXTS = 128
"""Largest number of texts of one request: prompts times n."""
MOST_MESSAGES = 4096
MOST_TOKENS = 1 << 20
"""Largest number of tokens of one prompt in a body."""
LONGEST_NAME = 256
"""Largest number of characters of the name of a model or a person."""

Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Stop = Annotated[str, Field(min_length=1, max_length=4096)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[TokenId], Field(min_length=1, max_length=MOST_TOKENS)]
Whole = Annotated[int | None, Field(ge=1, le=MOST_TOKENS)]
Penalty = Annotated[float | None, Field(ge=-2, le=2)]
Bias = dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]]
Pattern = Annotated[str | None, Field(min_length=1, max_length=LONGEST)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
LongText = Annotated[str, Field(max_length=1 << 22)]
Labels = Annotated[dict[Name, Annotated[str, Field(max_length=4096)]], Field(max_length=64)]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    """Send the counts of tokens in a last chunk."""
    continuous_usage_stats: bool | None = None
    """Send the counts of tokens in each chunk."""
    include_obfuscation: bool | None = None
    """Without effect: chunks are not padded."""


class TextRequest(Body):
    """Fields of every request for text."""

    IGNORED: ClassVar[tuple[str, ...]] = (
        "user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "store",
    )  # fmt: skip
    """Fields that are accepted and have no effect; the header x-glassformer-ignored names those given."""

    model: Name
    """Name of a model, as GET /v1/models lists them."""
    stream: bool | None = None
    """Send the text as it is computed."""
    stream_options: StreamOptions | None = None
    """Contents of the stream."""
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    """Sampling temperature; 0 takes the most likely token. By default as the model's folder says."""
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    """Nucleus sampling: smallest set of tokens with this total probability."""
    top_k: Annotated[int | None, Field(ge=1, le=1 << 20)] = None
    """Number of most likely tokens to draw from (not in OpenAI's API)."""
    min_p: Annotated[float | None, Field(gt=0, le=1)] = None
    """Least probability of a token relative to the most likely one (not in OpenAI's API)."""
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    """Penalty on tokens that occurred before (not in OpenAI's API)."""
    frequency_penalty: Penalty = None
    """Amount subtracted from a token's logit for each of its occurrences in the answer."""
    presence_penalty: Penalty = None
    """Amount subtracted from the logits of tokens that occur in the answer."""
    logit_bias: Annotated[Bias | None, Field(max_length=1024)] = None
    """Amounts added to logits, by token id."""
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    """Texts before which an answer ends."""
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 63)] = None
    """Seed of the draws: the same request then gives the same text, whatever runs at the same time."""
    n: Annotated[int | None, Field(ge=1, le=MOST_TEXTS)] = None
    """Number of texts for each prompt."""
    ignore_eos: bool | None = None
    """Continue past the tokens that end a text (not in OpenAI's API)."""
    grammar: Pattern = None
    """Grammar that the answer follows, in Lark's form, or in llama.cpp's (GBNF) if it has ::= (not in OpenAI's API)."""
    regex: Pattern = None
    """Regular expression that the whole answer matches (not in OpenAI's API)."""
    glass: Inside | None = None
    """Values inside the model that the answer carries for each token (not in OpenAI's API)."""
    user: Name | None = None
    """Without effect."""
    metadata: Labels | None = None
    """Without effect."""
    safety_identifier: Name | None = None
    """Without effect."""
    prompt_cache_key: Name | None = None
    """Without effect: prompts that start alike are recognised by their tokens."""
    service_tier: Literal["auto", "default"] | None = None
    """Without effect."""
    store: Literal[False] | None = None
    """Nothing is stored."""

    def ignored(self) -> list[str]:
        """Returns the names of the given fields that have no effect."""
        found = [name for name in self.IGNORED if getattr(self, name) is not None]
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            found.append("stream_options.include_obfuscation")
        return found

    def descriptions(self) -> list[tuple[Kind, str, str]]:
        """Returns the descriptions that an answer must match, each kind, text and name of the field."""
        found: list[tuple[Kind, str, str]] = []
        if self.grammar is not None:
            found.append(("gbnf" if "::=" in self.grammar else "lark", self.grammar, "grammar"))
        if self.regex is not None:
            found.append(("regex", self.regex, "regex"))
        return found

    def description(self) -> tuple[Kind, str, str] | None:
        """Returns the description that an answer must match: kind, text, name of the field; None for a free text.

        Raises RequestError for two descriptions."""
        found = self.descriptions()
        if len(found) > 1:
            raise RequestError(
                f"{found[0][2]} and {found[1][2]} exclude each other; give one", code="conflict", field=found[1][2]
            )
        if found and self.ignore_eos:
            raise RequestError(f"ignore_eos does not go with {found[0][2]}", code="conflict", field="ignore_eos")
        return found[0] if found else None

    def options(self) -> dict[str, Any]:
        """Returns the given fields as options of a session."""
        same = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
                "n")  # fmt: skip
        found = {name: value for name in same if (value := getattr(self, name)) is not None}
        if self.seed is not None:
            found["seed"] = self.seed % (1 << 63)
        if self.stop is not None:
            found["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias:
            found["logit_bias"] = {int(token): amount for token, amount in self.logit_bias.items()}
        if self.ignore_eos:
            found["stop_at_eos"] = False
        if self.glass is not None and (self.n or 1) > 1:
            raise RequestError("glass goes with n=1", code="conflict", field="n", value=self.n)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true", code="conflict", field="stream_options")
        return found


class TextPart(Body):
    """Part of a message."""

    type: Literal["text"]
    text: Annotated[str, Field(max_length=1 << 22)]


class CalledFunction(Body):
    """Name and arguments of a call."""

    name: FunctionName
    arguments: LongText
    """JSON object."""


class GivenCall(Body):
    """Call of a function in a message of the assistant."""

    id: Name
    type: Literal["function"]
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Returns the call as chat templates read it. Raises RequestError for arguments that are not an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError(
                f"the arguments of {self.function.name} must be a JSON object", code="syntax",
                field="messages.tool_calls.function.arguments",
            )  # fmt: skip
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class ChatMessage(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: LongText | Annotated[list[TextPart], Field(max_length=1024)] | None = None
    """Text of the message; only a message with tool_calls may have none."""
    name: Name | None = None
    """Name of the writer, for templates that show it."""
    tool_calls: Annotated[list[GivenCall], Field(max_length=128)] | None = None
    """Calls that the assistant made."""
    tool_call_id: Name | None = None
    """Call that a message of the role tool answers."""
    refusal: None = None
    annotations: Annotated[list[None], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    def plain(self) -> dict[str, Any]:
        """Returns the message as chat templates read it. Raises RequestError for one without text."""
        if self.content is None and not self.tool_calls:
            raise RequestError("a message needs content", code="missing", field="messages.content")
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        role = "system" if self.role == "developer" else self.role
        found: dict[str, Any] = {"role": role, "content": text} | ({"name": self.name} if self.name else {})
        if self.tool_calls:
            found["tool_calls"] = [one.plain() for one in self.tool_calls]
        return found | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})


class TextFormat(Body):
    """Format of an answer: any text."""

    type: Literal["text"]


class JsonFormat(Body):
    """Format of an answer: a JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """JSON Schema with a name."""

    name: FunctionName
    description: LongText | None = None
    """Without effect: the model does not read it."""
    schema_: dict[str, Any] = Field({"type": "object"}, alias="schema")
    """JSON Schema. Keywords that cannot be enforced are refused."""
    strict: bool | None = None
    """Every schema is enforced, with or without it."""


class SchemaFormat(Body):
    """Format of an answer: JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


Format = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class Function(Body):
    """A function that the model may call."""

    name: FunctionName
    description: LongText | None = None
    """Text that the model reads."""
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments, which is enforced."""
    strict: bool | None = None
    """Every schema is enforced, with or without it."""

    def plain(self) -> dict[str, Any]:
        """Returns the function as chat templates read it."""
        return self.model_dump(exclude={"strict"}, exclude_none=True)


class Tool(Body):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """Name of a function."""

    name: FunctionName


class ToolChoice(Body):
    """Choice of the one function that an answer must call."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(TextRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: Whole = None
    """Largest number of new tokens; by default up to the end of the context."""
    max_completion_tokens: Whole = None
    """Newer name of max_tokens."""
    logprobs: bool | None = None
    """Report the log-probability of each token, of the model's own distribution."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    """Number of most likely tokens that are reported at each position."""
    response_format: Format | None = None
    """Format that the answer is held to."""
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    """Calls that the answer has: none, those that the model makes, at least one, or one of the named function."""
    parallel_tool_calls: bool | None = None
    """Allow several calls in an answer, 8 at most; true by default."""

    def functions(self) -> list[Function]:
        """Returns the functions that the answer may call. Raises RequestError for a choice that is not among them."""
        functions = [one.function for one in self.tools or ()]
        names = [one.name for one in functions]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise RequestError(f"two tools are named {twice}", code="conflict", field="tools", value=twice)
        if isinstance(self.tool_choice, ToolChoice):
            name = self.tool_choice.function.name
            if name not in names:
                raise RequestError(f"{name} is not among the tools", code="unknown", field="tool_choice", value=name)
            return [one for one in functions if one.name == name]
        if self.tool_choice == "required" and not functions:
            raise RequestError("tool_choice needs tools", code="missing", field="tools")
        return [] if self.tool_choice == "none" else functions

    def descriptions(self) -> list[tuple[Kind, str, str]]:
        """Returns the descriptions that an answer must match, each kind, text and name of the field."""
        found = super().descriptions()
        if isinstance(self.response_format, JsonFormat):
            found.append(("json_schema", '{"type": "object"}', "response_format"))
        elif isinstance(self.response_format, SchemaFormat):
            found.append(("json_schema", json.dumps(self.response_format.json_schema.schema_), "response_format"))
        if functions := self.functions():
            named = isinstance(self.tool_choice, ToolChoice)
            most = 1 if named or self.parallel_tool_calls is False else MOST_CALLS
            grammar = call_grammar(
                [one.plain() for one in functions], required=named or self.tool_choice == "required", most=most
            )
            found.append(("lark", grammar, "tools"))
            if self.logprobs:
                raise RequestError("logprobs do not go with tools", code="conflict", field="logprobs")
        return found

    def options(self) -> dict[str, Any]:
        """Returns the given fields as options of a session. Raises RequestError for fields that exclude each other."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", code="conflict", field="top_logprobs")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise RequestError(
                "max_tokens and max_completion_tokens differ; give one", code="conflict", field="max_completion_tokens"
            )
        found = super().options() | {"max_new_tokens": both.pop() if both else None}
        return found | ({"logprobs": self.top_logprobs or 0} if self.logprobs else {})


class CompletionRequest(TextRequest):
    """Body of POST /v1/completions."""

    prompt: (
        Annotated[str, Field(max_length=1 << 22)]
        | Annotated[list[Annotated[str, Field(max_length=1 << 22)]], Field(min_length=1, max_length=MOST_TEXTS)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=MOST_TEXTS)]
    )
    """A text, token ids, or a list of either."""
    max_tokens: Annotated[int | None, Field(ge=0, le=MOST_TOKENS)] = None
    """Largest number of new tokens, 16 by default; 0 with echo scores the prompt."""
    echo: bool | None = None
    """Put the prompt in front of the text; with logprobs, report those of the prompt too."""
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    """Report log-probabilities: of each token, and of this many most likely ones."""
    best_of: Annotated[int | None, Field(ge=1, le=MOST_TEXTS)] = None
    """Accepted if it equals n."""
    suffix: Literal[""] | None = None
    """Text after the insertion cannot be given."""

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, each a text or token ids."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)

    def options(self) -> dict[str, Any]:
        """Returns the given fields as options of a session. Raises RequestError for fields that exclude each other."""
        if self.best_of not in (None, self.n or 1):
            raise RequestError("best_of must equal n", code="unsupported", field="best_of", value=self.best_of)
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens=0 needs echo=true", code="conflict", field="max_tokens", value=0)
        if len(self.prompts()) * (self.n or 1) > MOST_TEXTS:
            raise RequestError(
                f"prompts times n is at most {MOST_TEXTS}", code="range", field="n", expected=f"at most {MOST_TEXTS}"
            )
        if self.glass is not None and (len(self.prompts()) > 1 or (self.echo and self.logprobs is not None)):
            raise RequestError("glass goes with one prompt that is not scored", code="conflict", field="glass")
        new = 16 if self.max_tokens is None else max(1, self.max_tokens)
        found = super().options() | {"max_new_tokens": new}
        return found | ({} if self.logprobs is None else {"logprobs": self.logprobs})


class EmbeddingRequest(Body):
    """Body of POST /v1/embeddings."""

    model: Name
    input: (
        Annotated[str, Field(min_length=1, max_length=1 << 22)]
        | Annotated[list[Annotated[str, Field(min_length=1, max_length=1 << 22)]], Field(min_length=1, max_length=2048)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=2048)]
    )
    """A text, token ids, or a list of either."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64 holds little-endian fp32."""
    dimensions: Annotated[int | None, Field(ge=1, le=1 << 20)] = None
    """Accepted if it is the model's own number."""
    user: Name | None = None
    """Without effect."""

    def ignored(self) -> list[str]:
        """Returns the names of the given fields that have no effect."""
        return ["user"] if self.user is not None else []

    def inputs(self) -> list[str | list[int]]:
        """Returns the inputs, each a text or token ids."""
        given: Any = self.input
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


class TokenizeRequest(Body):
    """Body of POST /tokenize."""

    model: Name
    prompt: Annotated[str, Field(max_length=1 << 22)]


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: Name
    tokens: Annotated[list[TokenId], Field(max_length=MOST_TOKENS)]


class TemplateRequest(Body):
    """Body of POST /apply-template."""

    model: Name
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    """Functions that the model may call."""

    def chat(self) -> ChatRequest:
        """Returns the chat request whose prompt is asked for."""
        return ChatRequest.model_construct(model=self.model, messages=self.messages, tools=self.tools)


Given = TypeVar("Given", bound=Body)


def with_fields(kind: type[Given], fields: dict[str, Any]) -> Given:
    """Returns a body with the fields that are not None. Raises RequestError for the first field at fault."""
    try:
        return kind.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as problem:
        raise wrong_field(problem) from None
