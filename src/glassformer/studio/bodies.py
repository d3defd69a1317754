"""Bodies of the requests of a page, with bounds on every text and number."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from glassformer.serving.body import Body
from glassformer.studio.known import LONGEST

Expression = Annotated[str, Field(min_length=1, max_length=LONGEST)]
Whole = Annotated[int | None, Field(ge=1, le=1 << 40)]


class LoginRequest(Body):
    """Token of the address that the command line printed."""

    token: Annotated[str, Field(max_length=512)]


class DifferenceRequest(Body):
    """Two models."""

    first: Expression
    second: Expression


class ExpressionRequest(Body):
    """A model."""

    expression: Expression


class ComposeRequest(Body):
    """A model, and one that it is compared with."""

    expression: Expression
    base: Expression | None = None


class ChoicesRequest(Body):
    """A model, and the axis whose choices are tried on it."""

    expression: Expression
    axis: Annotated[str, Field(max_length=64)]


class ChangeRequest(Body):
    """A model, and a change of it."""

    expression: Expression
    change: Annotated[str, Field(min_length=1, max_length=200)]


class CostRequest(Body):
    """A model, and the work that is planned."""

    expression: Expression
    train: bool = False
    machine: Annotated[str | None, Field(pattern=r"^[a-z0-9-]{1,32}(:[0-9]{1,4})?$")] = None
    nodes: Annotated[int | None, Field(ge=1, le=100_000)] = None
    batch: Whole = None
    context: Whole = None
    weights: Literal["float32", "bfloat16", "int8", "int4"] | None = None

    def options(self) -> dict[str, Any]:
        """Returns the keywords of `gf.plan` that are given."""
        found = self.model_dump(exclude={"expression"}, exclude_none=True)
        return {name: value for name, value in found.items() if value is not False}


class ModelRequest(Body):
    """A model with weights."""

    model: Expression


class NextRequest(Body):
    """A text, and the settings with which its next token would be drawn."""

    model: Expression
    text: Annotated[str, Field(min_length=1, max_length=100_000)]
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_k: Annotated[int | None, Field(ge=1, le=1 << 20)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    min_p: Annotated[float | None, Field(gt=0, le=1)] = None

    def settings(self) -> dict[str, Any]:
        """Returns the fields of `gf.Sampling` that are given."""
        return self.model_dump(exclude={"model", "text"}, exclude_none=True)


class LookRequest(Body):
    """A text that a model reads, without some of its components."""

    model: Expression
    text: Annotated[str, Field(min_length=1, max_length=20_000)]
    ablate: Annotated[list[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=64)] = []


class LearnRequest(Body):
    """A walk through a forward pass: of the guide's three tokens, of the toy, or of a model."""

    chapter: Literal["three", "toy", "model"]
    model: Expression | None = None
    text: Annotated[str, Field(min_length=1, max_length=2000)] = "the cat sat on"
    layer: Annotated[int, Field(ge=0, le=10_000)] = 0
    head: Annotated[int, Field(ge=0, le=10_000)] = 0


class StatesRequest(Body):
    """A text that a model reads, and the layer whose state is shown."""

    model: Expression
    text: Annotated[str, Field(min_length=1, max_length=20_000)]
    layer: Annotated[int | None, Field(ge=0, le=10_000)] = None


Place = tuple[Annotated[int, Field(ge=0, le=10_000)], Annotated[int, Field(ge=0, le=10_000)]]
"""Layer and position of a value."""


class PatchRequest(Body):
    """Two texts, and the places at which values of the first are put into the second."""

    model: Expression
    text: Annotated[str, Field(min_length=1, max_length=2000)]
    other: Annotated[str, Field(min_length=1, max_length=2000)]
    site: Literal["resid_pre", "mixer.out", "ffn.out"] = "resid_pre"
    places: Annotated[list[Place], Field(max_length=64)] = []
    every: bool = False


class TrainRequest(Body):
    """One model or several to train, a text, and the budget of each run."""

    models: Annotated[list[Expression], Field(min_length=1, max_length=8)]
    data: Annotated[str, Field(max_length=100)]
    minutes: Annotated[float | None, Field(gt=0, le=10_000)] = None
    tokens: Whole = None
    seeds: Annotated[int, Field(ge=1, le=20)] = 1
    allow_unmatched: bool = False
    watch: bool = True
    """Record statistics of layers and heads."""


Comparison = Annotated[str, Field(min_length=1, max_length=64)]


class RunRequestBody(Body):
    """A comparison by its name."""

    name: Comparison


class RunsRequest(Body):
    """Comparisons whose curves are laid over each other."""

    names: Annotated[list[Comparison], Field(min_length=1, max_length=6)]


class WhyRequest(Body):
    """A run of a comparison."""

    name: Comparison
    run: Annotated[str, Field(min_length=1, max_length=200)]


class DynamicsRequest(Body):
    """A comparison, and a statistic that its runs recorded of their layers."""

    name: Comparison
    statistic: Annotated[str, Field(max_length=64)] = ""


class TextRequest(Body):
    """A piece of a text file of `size` bytes, in base64, from the byte `at` on."""

    name: Annotated[str, Field(min_length=1, max_length=255)]
    size: Annotated[int, Field(ge=0, le=1 << 50)]
    at: Annotated[int, Field(ge=0, le=1 << 50)] = 0
    content: Annotated[str, Field(max_length=6 << 20)]
