"""The result.json of an arm, and how much of it is believed when it is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.training import Recipe
from glassformer.training.progress import Count, Length, Measures, Written

Point = Annotated[list[float | None], Field(min_length=2, max_length=2)]


class _Training(Written):
    steps: Count
    tokens: Count
    seconds: Length
    tokens_per_second: Length
    peak_memory_bytes: int | None
    learning_rate: Length
    curve: list[Point]
    curve_seconds: list[Point]
    validation_curve: list[Point]


class _Generation(Written):
    tokens_per_second: Length
    seconds_per_token: Length
    state_bytes_per_token: Length
    sample: dict[str, Any]


class _Reach(Written):
    context: Count
    loss: float | None


class Result(Written):
    """What the table, the verdicts and the report read of an arm that was trained."""

    name: str
    seed: int
    parameters: Count
    flops_per_token: Length
    config: dict[str, Any]
    recipe: dict[str, Any]
    train: _Training
    validation: Measures | None
    generation: _Generation | None
    extrapolation: list[_Reach]
    dynamics: dict[str, Any]
    machine: dict[str, Any]
    status: Literal["ok", "diverged"]
    error: str | None

    @model_validator(mode="after")
    def _measured(self) -> Result:
        if self.status == "ok" and (self.validation is None or self.generation is None):
            raise ValueError("an arm that was trained to its end has been measured")
        return self


class _Entry(Written):
    name: str
    config: dict[str, Any] = {}
    recipe: dict[str, Any] = {}
    seed: int = 0
    status: str = "ok"


class Results(Written):
    """What a results.json must have to be one of a comparison, and what tells comparisons apart."""

    version: Literal[1] = Field(alias="schema")
    data: dict[str, Any]
    budget: dict[str, Any]
    runs: list[_Entry]

    @property
    def names(self) -> list[str]:
        """The models of which there are runs, in their order."""
        return list(dict.fromkeys(run.name for run in self.runs))


def read_results(folder: Path) -> Results | None:
    """The results.json of a folder, if there is one. Raises RequestError where it is not of a comparison."""
    path = folder / "results.json"
    if not path.exists():
        return None
    try:
        return Results.model_validate_json(path.read_bytes())
    except (OSError, ValueError):  # of pydantic, too
        raise RequestError(
            f"--out {folder} holds a results.json that is not of a comparison; name another folder"
        ) from None


def read_result(place: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """The result of the arm in `place`; None where there is none, or none that this request can have left."""
    try:
        result = json.loads((place / "result.json").read_text(encoding="utf-8"))
        json.dumps(result, allow_nan=False)  # it will be written into results.json
        read = Result.model_validate(result)
    except (OSError, ValueError, RecursionError):  # of pydantic, too
        return None
    asked = (request["name"], request["recipe"]["seed"], request["config"], request["recipe"])
    found = (read.name, read.seed, ModelConfig.current(read.config), Recipe.current(read.recipe))
    return result if found == asked else None
