"""Bodies of requests. A field is obeyed, or reported as without effect, or refused; no field is dropped in silence."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from glassformer.errors import RequestError

MOST_TEXTS = 128
"""Texts of one request: prompts times n."""
MOST_MESSAGES = 4096
MOST_TOKENS = 1 << 20
"""Tokens of one prompt in a body."""
LONGEST_NAME = 256
"""Characters of the name of a model or a person."""

Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Stop = Annotated[str, Field(min_length=1, max_length=4096)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[TokenId], Field(min_length=1, max_length=MOST_TOKENS)]
Whole = Annotated[int | None, Field(ge=1, le=MOST_TOKENS)]
Penalty = Annotated[float | None, Field(ge=-2, le=2)]
Bias = dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]]
Labels = Annotated[dict[Name, Annotated[str, Field(max_length=4096)]], Field(max_length=64)]


class Body(BaseModel):
    """A body in which unknown fields and other types are refused, and null means that a field is absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Body):
    """Contents of a stream."""

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
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true", code="conflict", field="stream_options")
        return found


class TextPart(Body):
    """Part of a message."""

    type: Literal["text"]
    text: Annotated[str, Field(max_length=1 << 22)]


class ChatMessage(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(max_length=1 << 22)] | Annotated[list[TextPart], Field(max_length=1024)]
    name: Name | None = None
    """Name of the writer, for templates that show it."""
    refusal: None = None
    annotations: Annotated[list[None], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[None], Field(max_length=0)] | None = None

    def plain(self) -> dict[str, str]:
        """Returns the message as chat templates read it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({"name": self.name} if self.name else {})


class TextFormat(Body):
    """Format of an answer."""

    type: Literal["text"]


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
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    tools: Annotated[list[None], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

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
