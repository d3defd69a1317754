"""Bodies of requests: nothing that is not declared is accepted."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from glassformer.errors import RequestError, shown


class Body(BaseModel):
    """A body in which unknown fields and other types are refused, and null means that a field is absent."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True, use_attribute_docstrings=True
    )


Given = TypeVar("Given", bound=Body)


async def body_of(request: Request, kind: type[Given]) -> Given:
    """Returns the body of a request as a checked instance of `kind`. Raises RequestError for the first wrong field."""
    raw = await request.body()
    try:
        return await run_in_threadpool(kind.model_validate_json, raw)
    except ValidationError as problem:
        raise wrong_field(problem) from None


def wrong_field(problem: ValidationError) -> RequestError:
    """Returns an error of one sentence for the first problem of a validation, with the path of the field."""
    errors = problem.errors(include_url=False, include_input=False, include_context=False)
    first = max(errors, key=lambda one: len(one["loc"])) if len({one["loc"][:1] for one in errors}) == 1 else errors[0]
    field = ".".join(str(step) for step in first["loc"] if not _is_branch(step)) or "body"
    kinds: dict[str, Any] = {"extra_forbidden": "unknown", "missing": "missing", "json_invalid": "syntax"}
    code = kinds.get(first["type"], "range" if "than" in first["type"] or "too_" in first["type"] else "type")
    if first["type"] == "extra_forbidden":
        return RequestError(
            f"{shown(field)} is not a field that this server can obey", code="unknown", field=shown(field)
        )
    return RequestError(f"{shown(field)}: {shown(first['msg'], 200)}", code=code, field=shown(field))


def _is_branch(step: int | str) -> bool:
    """Returns True for a step of a path that names an alternative of a type, not a field."""
    return isinstance(step, str) and (step.startswith(("function-", "list[", "constrained-")) or step in ("str", "int"))
