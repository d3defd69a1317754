"""JSON of answers and bodies of errors. Torch is not imported here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from glassformer.errors import RequestError, WorkError


def error_body(
    message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Returns the body of an error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


FIELDS = {
    "max_new_tokens": "max_tokens", "tokens": "prompt", "tokenizer.chat_template": "messages",
    "stop_at_eos": "ignore_eos",
}  # fmt: skip
"""Name of a field in a session -> name in a request."""


def refusal(problem: RequestError | WorkError, prompt: str = "prompt") -> tuple[int, dict[str, Any]]:
    """Returns HTTP status and body for an error of the library; `prompt` is the request's field with the prompt."""
    if isinstance(problem, WorkError):
        return 500, error_body(str(problem), "server_error", code=problem.code)
    param, code = FIELDS.get(problem.field, problem.field), problem.code
    if param == "prompt":
        param = prompt
        if code == "range":
            return 400, error_body(str(problem), param=param, code="context_length_exceeded")
    return 400, error_body(str(problem), param=param, code=code)


def event(body: Mapping[str, Any] | str) -> bytes:
    """Returns a server-sent event, encoded, with a body as JSON, or a text."""
    return f"data: {body if isinstance(body, str) else dumps(body)}\n\n".encode()


def dumps(body: Any) -> str:
    """Returns a body as JSON. Raises ValueError for NaN and infinity, which JSON does not have."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
