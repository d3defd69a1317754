"""Bodies of requests: nothing that is not declared is accepted."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """A body in which unknown fields and other types are refused, and null means that a field is absent."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True, use_attribute_docstrings=True
    )
