"""Tools of an agent: arguments with bounds, and results as plain values.

Models are named by expressions of published models and families, texts by the names of those that the library holds,
comparisons by plain names in one folder: no argument is a path, an address or a name on the Hub. A refusal is a result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import RenderableType

from glassformer.agents.comparisons import Comparisons
from glassformer.comparison import Design
from glassformer.errors import RequestError, WorkError, shown
from glassformer.figures.terminal import Printed, ruled
from glassformer.laboratory.anatomy import Anatomy
from glassformer.names import grammar
from glassformer.names.checks import check_change, check_machine, names_a_model
from glassformer.names.known import CORPORA, FAMILIES, PRESETS, TASKS
from glassformer.names.places import unknown
from glassformer.naming import preset
from glassformer.naming.catalogue import PresetCatalogue
from glassformer.planning import plan

LARGEST_RESULT = 1 << 18
"""Largest number of bytes of a result as JSON; a larger one is refused, with the remedy."""
LONGEST_WAIT = 50.0
"""Largest number of seconds that the tool `results` waits; clients give up after 60."""
DETAILS = ("components", "layers", "symbols")
"""Fields of a plan that explain its figures."""

Expression = Annotated[str, Field(min_length=1, max_length=512)]
Amount = Annotated[int, Field(ge=1, le=1 << 50)]


class Arguments(BaseModel):
    """Arguments of a tool; unknown fields and other types are refused."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True, use_attribute_docstrings=True
    )
    WRITES: ClassVar[bool] = False
    """True for a tool that starts work and writes files."""

    def call(self, comparisons: Comparisons) -> dict[str, Any]:
        """Runs the tool over the folder `comparisons`; returns its result as plain values.

        Raises RequestError for arguments that cannot be served, WorkError if the work fails."""
        raise NotImplementedError


class PlanTool(Arguments):
    """Computes parameters, FLOPs, memory and decode state of models exactly, without building them; with a machine also
    the largest batch that fits, time and cost."""

    models: Annotated[list[Expression], Field(min_length=1, max_length=16)]
    """Expressions NAME[@SIZE][+CHANGE...], such as llama-3-8b, qwen3-8b+window:4096, llama@10m+gqa:2."""
    context: Annotated[int | None, Field(ge=1, le=1 << 28)] = None
    """Tokens of a sequence; by default the shortest context of the models."""
    batch: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """Sequences in one batch."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype."""
    weights: Literal["float32", "bfloat16", "int8", "int4"] | None = None
    """Dtype of the stored weights; by default `dtype`."""
    machine: Annotated[str | None, Field(max_length=64)] = None
    """Accelerators of a node, such as h100 or h100:8."""
    nodes: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    """Number of nodes."""
    train: bool = False
    """Plan a training step; otherwise decoding."""
    tokens: Amount | None = None
    """Training tokens, for days, energy and cost; needs `machine` and `train`."""
    explain: bool = False
    """Add parameters by component and by matrix of a layer, with their formulas."""

    def call(self, comparisons: Comparisons) -> dict[str, Any]:
        """Returns {"plans": a dict for each model}, as `glassformer plan --json` prints; without `explain`, the fields
        `components`, `layers` and `symbols` are left out."""
        for model in self.models:
            check_published(model)
        if self.machine is not None:
            check_machine(self.machine)
        given = self.model_dump(exclude={"models"})
        found = plan(self.models, **given).to_dict()
        plans = found if isinstance(found, list) else [found]
        if not self.explain:
            plans = [{key: value for key, value in one.items() if key not in DETAILS} for one in plans]
        return {"plans": plans}


class PresetsTool(Arguments):
    """Lists the names, sizes and changes that an expression of a model is made of."""

    word: Annotated[str | None, Field(max_length=64)] = None
    """Only names and changes that contain it, such as rope."""

    def call(self, comparisons: Comparisons) -> dict[str, Any]:
        """Returns presets with their number of parameters, families, sizes and changes."""
        return PresetCatalogue.of(self.word).to_dict()


class DiffTool(Arguments):
    """Lists the parts and fields in which two models differ, each with the change that leads from one to the other."""

    a: Expression
    """Expression of a model."""
    b: Expression
    """Expression of the other model."""

    def call(self, comparisons: Comparisons) -> dict[str, Any]:
        """Returns a dict: `parameters` by expression, differing `parts` and `fields`, and `equal`."""
        for model in (self.a, self.b):
            check_published(model)
        mine, other = preset(self.a), preset(self.b)
        found = Anatomy(self.a, mine, self.b, other).to_dict()
        sizes = {name: config.num_params() for name, config in ((self.a, mine), (self.b, other))}
        return {"parameters": sizes, "parts": found["ideas"], "fields": found["diff"], "equal": not found["diff"]}


class CompareTool(Arguments):
    """Trains two or more models on one text under one budget, on seeds that the server draws, and judges their held-out
    losses with intervals. It returns at once; ask `results` for the verdicts. An unfair comparison is refused."""

    WRITES: ClassVar[bool] = True

    models: Annotated[list[Expression], Field(min_length=2, max_length=8)]
    """Expressions of the models, such as gpt2@1m and gpt2@1m+rope; the first is the baseline."""
    data: Annotated[str, Field(max_length=64)]
    """Text: python-docs, python-source or number-words, or a task such as induction."""
    tokens: Amount | None = None
    """Budget of each run in training tokens. Give one of tokens, flops, minutes."""
    flops: Annotated[float | None, Field(gt=0, le=1e30)] = None
    """Budget of each run in training FLOPs."""
    minutes: Annotated[float | None, Field(gt=0, le=10_000)] = None
    """Budget of each run in minutes."""
    match: Literal["tokens", "flops", "minutes"] | None = None
    """Quantity that is equal between models; by default that of the budget."""
    seeds: Annotated[int, Field(ge=1, le=20)] = 3
    """Number of runs of each model, on seeds that the server draws. One seed gives no verdict."""
    batch_size: Annotated[int | None, Field(ge=1, le=4096)] = None
    """Sequences of an optimizer step."""
    context: Annotated[int | None, Field(ge=2, le=1 << 16)] = None
    """Tokens of a sequence."""
    allow_unmatched: bool = False
    """Allow models of different size."""
    name: Annotated[str | None, Field(max_length=64)] = None
    """Name of the comparison; by default the server gives one."""

    def call(self, comparisons: Comparisons) -> dict[str, Any]:
        """Starts the comparison in a process; returns at once its name, state, design, seeds, similar comparisons and
        largest number of minutes. Raises RequestError for a design that is refused, and while another comparison is
        computed."""
        check_text_name(self.data)
        return comparisons.start(self.design(self.data), self.name)

    def design(self, data: str, **recipe: Any) -> Design:
        """Returns the comparison on a text, with fields of the recipe. Raises RequestError for an unfair one, for a
        model that is a file, and for a field that the server chooses."""
        for model in self.models:
            check_published(model)
            for change in grammar.parse(model, names_a_model)[2]:
                if change.replace(" ", "").startswith(("recipe.seed=", "recipe.device=", "recipe.threads=")):
                    raise RequestError(
                        f"+{change}: the server chooses it, alike for all models; leave it out",
                        code="unsupported", field=change.partition("=")[0], value=model,
                    )  # fmt: skip
        given = {"batch_size": self.batch_size, "context": self.context, **recipe}
        return Design.of(
            self.models, data, tokens=self.tokens, flops=self.flops, minutes=self.minutes, match=self.match,
            seeds=self.seeds, allow_unmatched=self.allow_unmatched,
            recipe={name: value for name, value in given.items() if value is not None},
        )  # fmt: skip


class RunsTool(Arguments):
    """Lists the comparisons in the server's folder, with their state."""

    def call(self, comparisons: Comparisons) -> dict[str, Any]:
        """Returns {"comparisons": name, state, models, seeds and date of each, the latest first}."""
        return {"comparisons": comparisons.listed()}


class ResultsTool(Arguments):
    """Reports a comparison: its state, and once all runs have ended its verdicts with intervals, its notes and its
    runs, failed and diverged ones included. `similar` names other comparisons of the same models on the same text;
    report them together."""

    name: Annotated[str, Field(max_length=64)]
    """Name of the comparison."""
    wait: Annotated[float, Field(ge=0, le=LONGEST_WAIT)] = 0.0
    """Seconds to wait for the end."""

    def call(self, comparisons: Comparisons) -> dict[str, Any]:
        """Returns the state of the comparison, and once it is complete its verdicts and runs, by
        `Comparisons.outcome`."""
        return comparisons.outcome(self.name, self.wait)


TOOLS: dict[str, type[Arguments]] = {
    "plan": PlanTool, "presets": PresetsTool, "diff": DiffTool, "compare": CompareTool, "results": ResultsTool,
    "runs": RunsTool,
}  # fmt: skip
"""Name of a tool -> class of its arguments, whose docstring is its description."""


@dataclass(frozen=True)
class ToolList(Printed):
    """Tools that a server offers, as a value that prints itself as a table."""

    tools: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Returns {"tools": a dict for each}: name, description, schema (of its arguments) and writes (True if it
        does)."""
        return {"tools": self.tools}

    def lines(self) -> Iterator[str | RenderableType]:
        """Yields a table with name, arguments and description of each tool."""
        table = ruled()
        for heading in ("tool", "arguments", "description"):
            table.add_column(heading, overflow="fold")
        for one in self.tools:
            table.add_row(one["name"], ", ".join(one["schema"]["properties"]), one["description"])
        yield table


class ToolAnswer(NamedTuple):
    """Result of a call as plain values; if `refused`, the only one is the error, under the key "refused"."""

    fields: dict[str, Any]
    refused: bool


@dataclass(frozen=True)
class Toolbox:
    """Set of tools over one folder of comparisons; without `allow_runs`, a tool that starts work is refused."""

    comparisons: Comparisons
    allow_runs: bool = False

    def described(self) -> list[dict[str, Any]]:
        """Returns a dict for each tool that is offered: name, description, schema (of its arguments) and writes."""
        return [
            {
                "name": name,
                "description": " ".join((kind.__doc__ or "").split()),
                "schema": schema_of(kind),
                "writes": kind.WRITES,
            }
            for name, kind in TOOLS.items()
            if self.allow_runs or not kind.WRITES
        ]

    def call(self, name: str, arguments: Any) -> ToolAnswer:
        """Runs the tool `name`; returns its result, or its error with code, field and message."""
        try:
            return ToolAnswer(self._called(name, arguments), False)
        except (RequestError, WorkError) as problem:
            return ToolAnswer({"refused": problem.to_dict()}, True)

    def _called(self, name: str, arguments: Any) -> dict[str, Any]:
        kind = TOOLS.get(name)
        if kind is None:
            known = ", ".join(TOOLS)
            raise RequestError(f"no tool is named {shown(repr(name))}; there are {known}", code="unknown", field="tool")
        if kind.WRITES and not self.allow_runs:
            raise RequestError(
                f"{name} starts training, which this server does not allow: glassformer mcp --allow-runs does",
                code="unsupported", field="tool", value=name,
            )  # fmt: skip
        try:
            asked = kind.model_validate_json(json.dumps({} if arguments is None else arguments))
        except ValidationError as problem:
            first = problem.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "arguments"
            raise RequestError(f"{where}: {first['msg']}", code="type", field=where) from None
        except (ValueError, RecursionError):
            raise RequestError("the arguments are not JSON", code="syntax", field="arguments") from None
        found = asked.call(self.comparisons)
        if len(json.dumps(found, allow_nan=False)) > LARGEST_RESULT:
            raise RequestError(
                f"the result has more than {LARGEST_RESULT >> 10} KiB; ask for fewer models, or without explain",
                code="range", field="models",
            )  # fmt: skip
        return found


def schema_of(kind: type[Arguments]) -> dict[str, Any]:
    """Returns the JSON Schema of a tool's arguments, without titles and without the tool's description."""
    schema = kind.model_json_schema()
    for one in (schema, *schema["properties"].values()):
        one.pop("title", None)
    schema.pop("description", None)
    return schema


def check_published(expression: str) -> None:
    """Raises RequestError unless the expression is one of a published model or family, without files or weights."""
    name, _, changes = grammar.parse(expression, names_a_model)
    if not (name in PRESETS or name in FAMILIES):
        if grammar.looks_like_path(name) or name.startswith("hf:"):
            raise RequestError(
                f"{shown(repr(name))} is a file, a folder or a name on the Hub, which tools do not open; presets lists "
                "the models",
                code="unsupported", field="model", value=name,
            )  # fmt: skip
        raise unknown(name)
    for change in changes:
        check_change(change)


def check_text_name(data: str) -> None:
    """Raises RequestError unless the text is one that the library holds, or a task that it makes."""
    if data not in CORPORA and data.partition(":")[0] not in TASKS:
        raise RequestError(
            f"data={shown(repr(data))}: tools take {', '.join((*CORPORA, *TASKS))}",
            code="unsupported", field="data", value=data, expected=", ".join((*CORPORA, *TASKS)),
        )  # fmt: skip
