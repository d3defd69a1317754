"""Bodies of the requests of a page, with bounds on every text and number."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from glassformer.serving.body import Body
from glassformer.studio.known import LONGEST

Expression = Annotated[str, Field(min_length=1, max_length=LONGEST)]
Whole = Annotated[int | None, Field(ge=1, le=1 << 40)]


class LoginRequest(Body):
    """Body of POST /api/login: the token of the address that the command line printed."""

    token: Annotated[str, Field(max_length=512)]


class DifferenceRequest(Body):
    """Body of POST /api/difference: expressions of two models."""

    first: Expression
    second: Expression


class ExpressionRequest(Body):
    """Body of POST /api/exports: the expression of a model."""

    expression: Expression


class ComposeRequest(Body):
    """Body of POST /api/compose: a model, and one that it is compared with."""

    expression: Expression
    base: Expression | None = None


class ChoicesRequest(Body):
    """Body of POST /api/choices: a model, and the axis whose choices are tried on it."""

    expression: Expression
    axis: Annotated[str, Field(max_length=64)]


class ChangeRequest(Body):
    """Body of POST /api/change: a model, and a change of it."""

    expression: Expression
    change: Annotated[str, Field(min_length=1, max_length=200)]


class CostRequest(Body):
    """Body of POST /api/cost: a model, and the work that is planned."""

    expression: Expression
    train: bool = False
    machine: Annotated[str | None, Field(pattern=r"^[a-z0-9-]{1,32}(:[0-9]{1,4})?$")] = None
    nodes: Annotated[int | None, Field(ge=1, le=100_000)] = None
    batch: Whole = None
    context: Whole = None
    weights: Literal["float32", "bfloat16", "int8", "int4"] | None = None

    def options(self) -> dict[str, Any]:
        """Returns the given fields as keywords of `gf.plan`."""
        found = self.model_dump(exclude={"expression"}, exclude_none=True)
        return {name: value for name, value in found.items() if value is not False}


class ModelRequest(Body):
    """Body of POST /api/model: name of a model with weights."""

    model: Expression


class NextRequest(Body):
    """Body of POST /api/next: a text, and the sampling settings for its next token."""

    model: Expression
    text: Annotated[str, Field(min_length=1, max_length=100_000)]
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_k: Annotated[int | None, Field(ge=1, le=1 << 20)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    min_p: Annotated[float | None, Field(gt=0, le=1)] = None

    def settings(self) -> dict[str, Any]:
        """Returns the given sampling settings as fields of `gf.Sampling`."""
        return self.model_dump(exclude={"model", "text"}, exclude_none=True)


class LookRequest(Body):
    """Body of POST /api/look: a text, and the components to remove from the model that reads it."""

    model: Expression
    text: Annotated[str, Field(min_length=1, max_length=20_000)]
    ablate: Annotated[list[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=64)] = []


class LearnRequest(Body):
    """Body of POST /api/learn: a walk through a forward pass of the guide's three tokens, of the toy, or of a model."""

    chapter: Literal["three", "toy", "model"]
    model: Expression | None = None
    text: Annotated[str, Field(min_length=1, max_length=2000)] = "the cat sat on"
    layer: Annotated[int, Field(ge=0, le=10_000)] = 0
    head: Annotated[int, Field(ge=0, le=10_000)] = 0


class StatesRequest(Body):
    """Body of POST /api/states: a text that a model reads, and the layer whose state is shown."""

    model: Expression
    text: Annotated[str, Field(min_length=1, max_length=20_000)]
    layer: Annotated[int | None, Field(ge=0, le=10_000)] = None


Place = tuple[Annotated[int, Field(ge=0, le=10_000)], Annotated[int, Field(ge=0, le=10_000)]]
"""Layer and position of a value."""


class PatchRequest(Body):
    """Body of POST /api/patch: two texts, and the places at which values of the first are put into the second."""

    model: Expression
    text: Annotated[str, Field(min_length=1, max_length=2000)]
    other: Annotated[str, Field(min_length=1, max_length=2000)]
    site: Literal["resid_pre", "mixer.out", "ffn.out"] = "resid_pre"
    places: Annotated[list[Place], Field(max_length=64)] = []
    every: bool = False


class TrainRequest(Body):
    """Body of a training to plan or start: models, a text, and the budget of each run."""

    models: Annotated[list[Expression], Field(min_length=1, max_length=8)]
    data: Annotated[str, Field(max_length=100)]
    minutes: Annotated[float | None, Field(gt=0, le=10_000)] = None
    tokens: Whole = None
    seeds: Annotated[int, Field(ge=1, le=20)] = 1
    allow_unmatched: bool = False
    watch: bool = True
    """True to record statistics of layers and heads."""


Comparison = Annotated[str, Field(min_length=1, max_length=64)]
MOST_OVER = 6
"""Largest number of comparisons in one figure."""


class RunRequestBody(Body):
    """Body of POST /api/runs/stop and /api/runs/resume: name of a comparison."""

    name: Comparison


class RunsRequest(Body):
    """Body of POST /api/runs/over: names of comparisons whose curves are drawn in one figure."""

    names: Annotated[list[Comparison], Field(min_length=1, max_length=MOST_OVER)]


class WhyRequest(Body):
    """Body of POST /api/runs/why: a run of a comparison."""

    name: Comparison
    run: Annotated[str, Field(min_length=1, max_length=200)]


class DynamicsRequest(Body):
    """Body of POST /api/runs/dynamics: a comparison, and a statistic that its runs recorded by layer."""

    name: Comparison
    statistic: Annotated[str, Field(max_length=64)] = ""


class TextPieceRequest(Body):
    """Body of POST /api/texts: a piece, in base64, of a text file of `size` bytes, which starts at byte `at`. `upload`
    is a random number in hexadecimal digits, equal for the pieces of one file."""

    upload: Annotated[str, Field(pattern=r"^[0-9a-f]{16,32}$")]
    name: Annotated[str, Field(min_length=1, max_length=255)]
    size: Annotated[int, Field(ge=0, le=1 << 50)]
    at: Annotated[int, Field(ge=0, le=1 << 50)] = 0
    content: Annotated[str, Field(max_length=6 << 20)]
