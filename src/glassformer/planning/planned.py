"""Base of the values that `gf.plan` returns, and a sequence of plans of several models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Self, TypeVar

from rich.console import RenderableType
from rich.table import Table

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.figures import tag
from glassformer.figures.terminal import Reported, Tabular, dim, unruled
from glassformer.planning.counts import Counts
from glassformer.planning.machines import Cluster
from glassformer.report.plan_page import render_plan

WIDEST = 32
"""Most columns of a name above a plan; a longer name is folded."""


@dataclass(frozen=True, kw_only=True)
class PrintedPlan(Reported):
    """Base of the plans that `gf.plan` returns for one model: printed as text, and shown as a page."""

    name: str = ""
    """Name of the model: its expression, or its key in a mapping of models."""
    explain: bool = False
    """True if the text shows every value with its formula."""
    command: str = ""
    """Command that the page shows for copying. If empty, none."""

    def beside(self, *others: Self) -> Iterator[str | RenderableType]:
        """Yields the printed text of this plan and of the plans `others` of other models, a column each."""
        raise NotImplementedError

    def lines(self) -> Iterator[str | RenderableType]:
        return self.beside()

    def page(self) -> dict[str, Any]:
        """Returns the data of the plan's page. Raises RequestError if this kind of plan has no page."""
        message = f"{self.name or 'this plan'}: only plans of generation and of training steps have a page"
        raise RequestError(message, code="unsupported", field="out", value=type(self).__name__)

    def html(self) -> str:
        """Returns the plan's page as HTML. Raises RequestError if no layout fits, or if the plan was measured."""
        return render_plan([self.page()], self.command)

    def _repr_html_(self) -> str:
        return tag("pre", str(self))


def page_of(config: ModelConfig, on: Cluster | None, name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Returns the data of a plan's page: the plan's own values `figures`, the parameters by component, and the
    machine."""
    counts = Counts(config)
    placed = {} if on is None else {
        "machine_title": on.machine.title, "machine_memory": on.machine.memory, "machine_node": on.node,
    }  # fmt: skip
    named = {"name": name, "parameters": config.num_params(), "symbols": counts.symbols}
    return {**figures, **named, **placed, "components": [asdict(part) for part in counts.components]}


def columns(heading: str, plans: Sequence[PrintedPlan]) -> Table:
    """Returns an empty table whose first column is titled `heading`, with a further column for each plan."""
    table = unruled()
    table.add_column(heading)
    for one in plans:
        table.add_column(one.name, justify="right", overflow="fold", max_width=WIDEST)
    return table


P = TypeVar("P", bound=PrintedPlan)


@dataclass(frozen=True)
class Plans(Reported, Tabular, Generic[P]):
    """Plans of several models, of one kind, printed side by side.

    Examples
    --------
    >>> import glassformer as gf
    >>> plans = gf.plan(["gpt2@1m", "llama@1m"])
    >>> [one.name for one in plans]
    ['gpt2@1m', 'llama@1m']
    >>> plans["gpt2@1m"].parameters == plans[0].parameters
    True
    """

    plans: tuple[P, ...]
    context: int
    """Tokens of a sequence in all plans."""
    shortened: dict[str, int]
    """Context that models are trained for, by name, if it is longer than `context` and no context was asked for."""
    command: str = ""
    """Command that the page shows for copying. If empty, none."""

    def __iter__(self) -> Iterator[P]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, key: int | str) -> P:
        """Returns a plan by its index, or by the name of its model."""
        if isinstance(key, int):
            return self.plans[key]
        return {one.name: one for one in self.plans}[key]

    def lines(self) -> Iterator[str | RenderableType]:
        yield from self.plans[0].beside(*self.plans[1:])
        if self.shortened:
            longer = ", ".join(f"{name} is trained for {context:,}" for name, context in self.shortened.items())
            told = f"all at {self.context:,} tokens, the shortest context of these models ({longer})"
            yield dim(f"{told}; --context gives another")

    def to_dict(self) -> list[dict[str, Any]]:
        """Returns the plans as plain values, a dict for each."""
        return [one.to_dict() for one in self.plans]

    def records(self) -> list[dict[str, Any]]:
        """Returns a row for each model, with a column for each scalar of its plan."""
        kinds = (str, int, float, type(None))
        return [{key: value for key, value in one.items() if isinstance(value, kinds)} for one in self.to_dict()]

    def html(self) -> str:
        return render_plan([one.page() for one in self.plans], self.command)

    def _repr_html_(self) -> str:
        return tag("pre", str(self))
