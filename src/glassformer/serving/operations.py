"""Table of the server's routes, and the OpenAPI document made of routes and bodies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic.json_schema import models_json_schema

from glassformer.serving.body import Body
from glassformer.serving.messages import CountRequest, MessagesRequest
from glassformer.serving.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TemplateRequest,
    TokenizeRequest,
)
from glassformer.serving.responses import ResponsesRequest
from glassformer.version import __version__


@dataclass(frozen=True)
class Operation:
    """A route of the server, with its handler, body and summary."""

    path: str
    handler: str
    """Name of the method of `Api` that answers."""
    summary: str
    body: type[Body] | None = None
    """Body of a POST; None for a GET."""
    streams: bool = False
    """True if the answer can be a stream of server-sent events."""
    media: str = "application/json"

    @property
    def method(self) -> Literal["GET", "POST"]:
        """HTTP method: POST with a body, else GET."""
        return "GET" if self.body is None else "POST"


OPERATIONS = (
    Operation("/v1/chat/completions", "chat", "Answers the messages of a chat.", ChatRequest, True),
    Operation("/v1/completions", "complete", "Continues texts, or scores them.", CompletionRequest, True),
    Operation("/v1/responses", "respond", "Answers a conversation; nothing is stored.", ResponsesRequest, True),
    Operation("/v1/messages", "message", "Answers messages in Anthropic's format.", MessagesRequest, True),
    Operation("/v1/messages/count_tokens", "count_tokens", "Counts the tokens of messages.", CountRequest),
    Operation("/v1/embeddings", "embed", "Turns texts into vectors.", EmbeddingRequest),
    Operation("/v1/models", "list_models", "Lists the models."),
    Operation("/v1/models/{name}", "one_model", "Describes one model."),
    Operation("/tokenize", "tokenize", "Returns the tokens of a text.", TokenizeRequest),
    Operation("/detokenize", "detokenize", "Returns the text of tokens.", DetokenizeRequest),
    Operation("/apply-template", "apply_template", "Returns the prompt of a chat.", TemplateRequest),
    Operation("/health", "health", "Answers that the server runs."),
    Operation("/metrics", "metrics", "Counts in the text format of Prometheus.", media="text/plain"),
    Operation("/openapi.json", "openapi", "This document."),
)
"""All routes of the server."""

STATUSES = {
    400: "A field is wrong, cannot be obeyed, or excludes another.", 401: "The token is missing.",
    403: "A page of another server asks.", 404: "The model or the route is unknown.",
    405: "The route takes another method.", 408: "The body did not arrive in time.", 413: "The body is too large.",
    415: "The body is not JSON.", 421: "The Host is foreign.", 429: "The queue is full; Retry-After has seconds.",
    431: "The headers are too large.", 500: "The server failed on this request.", 503: "Too many requests are open.",
}  # fmt: skip
"""Meanings of the HTTP statuses of refusals."""


def document() -> dict[str, Any]:
    """Returns the OpenAPI document (3.1) of all routes."""
    bodies = [one.body for one in OPERATIONS if one.body is not None]
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}", by_alias=True
    )
    error = {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
                "required": ["message", "type"],
            }
        },
        "required": ["error"],
    }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "Glassformer", "version": __version__},
        "paths": {one.path: {one.method.lower(): _operation(one)} for one in OPERATIONS},
        "components": {
            "schemas": {**schemas["$defs"], "Error": error},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _operation(one: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {one.media: {"schema": {"type": "string" if one.media == "text/plain" else "object"}}}
    if one.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    refused = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    responses: dict[str, Any] = {"200": {"description": one.summary, "content": content}}
    responses |= {str(status): {"description": words, **refused} for status, words in STATUSES.items()}
    found: dict[str, Any] = {"summary": one.summary, "operationId": one.handler, "responses": responses}
    if one.body is not None:
        schema = {"$ref": f"#/components/schemas/{one.body.__name__}"}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{name}" in one.path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return found


def fields(body: type[Body]) -> Iterator[tuple[str, str, str]]:
    """Yields name, type and description of each field of a body."""
    schema = body.model_json_schema(by_alias=True)
    required = schema.get("required", [])
    for name, one in schema["properties"].items():
        words = one.get("description", "")
        yield name, _type(one) + (", required" if name in required else ""), words


def _type(schema: dict[str, Any]) -> str:
    """Returns the type and bounds of a JSON schema in words."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "const" in schema:
        return f"`{schema['const']}`".replace("True", "true").replace("False", "false")
    if "enum" in schema:
        return " or ".join(f"`{one}`" for one in schema["enum"])
    some = schema.get("anyOf") or schema.get("oneOf")
    if some:
        return " or ".join(dict.fromkeys(_type(one) for one in some if one != {"type": "null"}))
    kind = schema.get("type", "any")
    if kind == "object":
        return "JSON object"
    if kind == "array":
        items = schema.get("items", {})
        return "empty list" if schema.get("maxItems") == 0 else f"list of {_type(items)}"
    bounds = {
        "minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below",
    }  # fmt: skip
    given = [f"{word} {schema[key]:,}" for key, word in bounds.items() if abs(schema.get(key, 1 << 62)) < 1 << 62]
    return " ".join([kind, *given])
