"""Types shared by the files that this package writes and reads back: checkpoints, metrics.jsonl, results.json."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Length = Annotated[float, Field(ge=0)]


class Written(BaseModel):
    """Part of a file of our own: types are exact, numbers finite; keys that are not named here are not read."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class Measures(Written):
    """Loss on held-out text, in nats per token, and what follows from it; see `training.evaluate`."""

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: Count
