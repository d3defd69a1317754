"""Records of a run's progress, validated when they are read back.

checkpoints/step_00001000/state.json    `Progress`
metrics.jsonl                           a line for each step, taken or skipped, and for each validation
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from glassformer.errors import RequestError
from glassformer.files import Count, Length, Measures, Written

ROLL_BACKS = 10
"""Times that one run may return to a checkpoint."""
LEFT_OUT = 10
"""Steps in a row whose loss or gradient is not finite that may be skipped."""


class Progress(Written):
    """Progress of a run at a checkpoint, without weights and optimizer state."""

    step: Count
    seconds: Length
    first_loss: float | None
    best: float | None
    recent: list[float]
    validation: Measures | None
    data: list[str]
    shift: Count = 0
    rolled_back: int = Field(0, ge=0, le=ROLL_BACKS)
    left_out: int = Field(0, ge=0, le=LEFT_OUT)
    callbacks: dict[str, dict[str, Any]] = {}
    """States of the callbacks that a user has passed."""
    dtype: Literal["float32", "bfloat16"] | None = None
    sums: Literal["sequence", "tree"] = "sequence"
    """Order in which gradients are summed; sequence in files without the field, which are older than trees."""
    sha256: dict[str, str]


class _Row(Written):
    """Fields that every line of metrics.jsonl has."""

    step: Count
    """Optimizer step, from 1."""
    tokens: Count
    """Training tokens read by the end of the step."""
    sources: Count | None = None
    """Source tokens read by the end of the step, in runs that read pairs; else None."""
    targets: Count | None = None
    """Target tokens read by the end of the step, in runs that read pairs; else None."""
    seconds: Length
    """Seconds of training so far."""


class _Taken(_Row):
    """Line of metrics.jsonl for a step that updated the weights."""

    loss: float
    """Training loss of the step's batch, in nats per token."""
    learning_rate: float
    """Learning rate of the step."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    tokens_per_second: float
    """Training tokens per second in the step."""


class _Skipped(_Row):
    """Line of metrics.jsonl for a step that was left out: the weights did not change."""

    skipped: float | str
    """Loss of the step, or the reason."""


class _Validated(_Row):
    """Line of metrics.jsonl for an evaluation on held-out text."""

    validation: Measures
    """Loss on held-out text."""


_ROWS: TypeAdapter[Any] = TypeAdapter(_Taken | _Skipped | _Validated)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics.jsonl, without invalid lines, such as a last one cut by a crash. Raises
    RequestError for a file that cannot be read."""
    rows: list[dict[str, Any]] = []
    try:
        rows = [row for line in path.read_text(encoding="utf-8").splitlines() if (row := metrics_row(line))]
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}", code="damaged", field=path.name) from None
    return rows


def metrics_row(line: str | bytes) -> dict[str, Any] | None:
    """Returns the row of a line of metrics.jsonl; None for an invalid line."""
    try:
        return _ROWS.validate_json(line).model_dump(exclude_unset=True)
    except ValidationError:
        return None
