"""Conversion of pydantic's errors to a RequestError with one sentence."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from glassformer.errors import Code, RequestError


def first_problem(error: ValidationError) -> Any:
    """Returns the first entry of pydantic's list of errors, with unknown keys first, because a misspelt key often
    explains the others."""
    return min(error.errors(), key=lambda one: one["type"] != "unknown_field")


def request_error(error: ValidationError, where: str = "", what: str = "config") -> RequestError:
    """Returns pydantic's `error` as a RequestError. `where` is the start of the message; `what` is the error's `field`
    if several fields contradict each other, so that it has no path."""
    first = first_problem(error)
    path = ".".join(str(step) for step in first["loc"])
    field = ".".join(filter(None, (path, str(first.get("ctx", {}).get("name", "")))))
    unknown = first["type"] == "unknown_field"
    value = None if first["type"] == "missing" else first["input"]
    if unknown and isinstance(value, dict):
        value = value.get(first["ctx"]["name"])
    expected = first["msg"].removeprefix("Value error, ")
    message, field = f"{where}{explain(error)}", (field if unknown else path) or what
    if isinstance(cause := first.get("ctx", {}).get("error"), RequestError):  # from a validator of the config
        field = ".".join(filter(None, (path, cause.field))) or what
        return RequestError(message, code=cause.code, field=field, value=cause.value, expected=cause.expected)
    return RequestError(message, code=_code_of(first["type"]), field=field, value=value, expected=expected)


def _code_of(kind: str) -> Code:
    """Returns the `code` of a RequestError for `kind`, the type of a pydantic error such as "int_parsing"."""
    if kind.endswith(("_type", "_parsing", "_from_float")):
        return "type"
    known: dict[str, Code] = {
        "unknown_field": "unknown", "part": "unknown", "kind": "conflict", "literal_error": "unknown",
        "value_error": "conflict", "missing": "missing",
    }  # fmt: skip
    return known.get(kind, "range")


def explain(error: ValidationError) -> str:
    """Returns one sentence about the first problem of a pydantic error."""
    first = first_problem(error)
    path = ".".join(str(step) for step in first["loc"])
    if first["type"] == "unknown_field":
        return f"{path}: {first['msg']}" if path else first["msg"]
    if first["type"] == "missing":
        return f"field {path} is missing"
    given = "" if isinstance(first["input"], (dict, list)) else f"={first['input']!r}"[:80]
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if first["type"] == "tuple_type":
        message = "give a list, such as [1, 2]"
    where = f"{path}{given}: " if path or given else ""
    return f"{where}{message[0].lower()}{message[1:]}"
