"""Accelerators, as data: what each one holds, reads, computes and costs (machines.yaml, or a file of one's own)."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, model_validator

from glassformer.config import read_tree, validated
from glassformer.errors import RequestError, shown
from glassformer.names.checks import check_machine
from glassformer.parts.core.base import Value
from glassformer.units import quantity

NODE = 8
"""Accelerators of a node where nobody says."""
KNOWN = Path(__file__).with_name("machines.yaml")


def _in(unit: str) -> Callable[[Any], float]:
    return lambda text: quantity(text, unit)


Bytes = Annotated[float, BeforeValidator(_in("B")), Field(gt=0)]
Rate = Annotated[float, BeforeValidator(_in("B/s")), Field(gt=0)]
Products = Annotated[float, BeforeValidator(_in("FLOP/s")), Field(gt=0)]
Share = Annotated[float, Field(gt=-1, allow_inf_nan=False)]
Watts = Annotated[float, BeforeValidator(_in("W")), Field(gt=0)]


def _written(value: Any) -> Any:
    """A date as it stands in the file; YAML makes some of them dates."""
    return value.isoformat() if isinstance(value, datetime.date) else value


class Price(Value):
    """What an accelerator costs for an hour: a range of offers, when they were seen, and where."""

    low: float = Field(ge=0)
    high: float = Field(ge=0)
    currency: str = Field(pattern="^[A-Z]{3}$")
    date: Annotated[str, BeforeValidator(_written)]
    source: str

    @model_validator(mode="after")
    def _ascends(self) -> Price:
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} is above high={self.high:g}; give the lower price as low")
        return self

    @classmethod
    def of(cls, text: str) -> Price:
        """2.5USD. Raises RequestError for a price without a currency."""
        number, currency = text[:-3].strip(), text[-3:]
        if not (currency.isascii() and currency.isalpha() and currency.isupper()):
            raise RequestError(
                code="type", field="price", value=text, expected="an hour's price with its currency, 2.5USD"
            )
        value = quantity(number, field="price")
        return cls(low=value, high=value, currency=currency, date="as given", source="as given")


class TimeFactors(Value):
    """How many times the roofline's seconds measured training steps took, by the kind of work (`planning/time.py`)."""

    products: float = Field(gt=0)
    scores: float = Field(gt=0)
    elementwise: float = Field(gt=0)
    links: float = Field(gt=0)
    error: tuple[Share, Share]
    """5th and 95th percentile of predicted / measured - 1 of models whose size the fit had not seen."""
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _ascends(self) -> TimeFactors:
        if self.error[0] > self.error[1]:
            raise ValueError(f"error={self.error} does not ascend; give the 5th percentile before the 95th")
        return self


class Machine(Value):
    """One accelerator. Bytes, bytes per second, FLOP/s of dense products by dtype, watts."""

    title: str
    memory: Bytes
    bandwidth: Rate
    peak: dict[str, Products]
    inside: Rate
    """Link to the others of its node, one way."""
    between: Rate
    """Link to other nodes, one way."""
    power: Watts
    device: Literal["cuda", "cpu"] = "cuda"
    """Whose kernels it runs."""
    source: str = Field(min_length=1)
    price: Price | None = None
    measured: TimeFactors | None = None
    """None: planned times are a range, from the machines that have been measured."""

    def peak_of(self, dtype: str) -> float:
        """FLOP/s in a dtype. Raises RequestError where the machine has no such products."""
        if dtype not in self.peak:
            options = ", ".join(self.peak)
            raise RequestError(code="unknown", field="dtype", value=dtype, expected=f"{options} on {self.title}")
        return self.peak[dtype]


@dataclass(frozen=True)
class Cluster:
    """`count` equal accelerators, `node` of them in each node."""

    name: str
    machine: Machine
    count: int = 1
    node: int = 1
    exact: bool = True
    """False: the number was not said."""

    def of(self, count: int) -> Cluster:
        """So many of the same, eight in a node."""
        return replace(self, count=count, node=min(count, NODE))

    @property
    def priced(self) -> str:
        """The machines in words, with their price and its source."""
        price, machine = self.machine.price, self.machine
        words = f"on {self.count} {machine.title}" if self.count > 1 else f"on {machine.title}"
        if price is None:
            return words
        hour = f"{price.low:g}" if price.low == price.high else f"{price.low:g} to {price.high:g}"
        source = "" if price.source == "as given" else f" ({price.date}, {price.source})"
        return f"{words}, {hour} {price.currency} an hour{source}"


def span(low: float, high: float, cell: Callable[[float], str] = "{:.3g}".format, unit: str = "") -> str:
    """Returns an interval in words."""
    return f"{cell(low)} to {cell(high)}{unit and ' '}{unit}"


def money(cost: tuple[float, float, str] | None) -> str:
    """Returns an interval of prices in words."""
    if cost is None:
        return "no price known"
    return span(cost[0], cost[1], lambda value: f"{value:,.2f}" if value < 100 else f"{value:,.0f}", cost[2])


@cache
def _known() -> dict[str, Machine]:
    tree = yaml.safe_load(KNOWN.read_text(encoding="utf-8"))
    return {str(name): validated(Machine, fields, "machine", str(name)) for name, fields in tree.items()}


def machines(own: str | Path | None = None) -> dict[str, Machine]:
    """Every known machine by name, those of a file of one's own over ours. Raises RequestError for a wrong file."""
    found = dict(_known())
    if own is not None:
        tree = read_tree(own)
        if not isinstance(tree, dict):
            raise RequestError(
                f"{own}: a file of machines is a mapping of names to machines",
                code="type", field="machines", value=tree,
            )  # fmt: skip
        for name, fields in tree.items():
            found[str(name)] = validated(Machine, fields, "machine", f"{own}: {shown(name)}")
    return found


def cluster(text: str, nodes: int = 1, own: str | Path | None = None) -> Cluster:
    """NAME or NAME:COUNT, COUNT in each of `nodes` nodes: "h100:8".

    Raises RequestError for an unknown machine, with the nearest."""
    name, _, count = text.partition(":")
    known = machines(own)
    check_machine(name, known)
    each = int(count) if count.isdecimal() and len(count) < 8 else 0 if count or ":" in text else 1
    if each < 1:
        raise RequestError(code="range", field="machine", value=text, expected="NAME:COUNT with a count from 1 up")
    if nodes < 1:
        raise RequestError(code="range", field="nodes", value=nodes, expected="a number of nodes from 1 up")
    return Cluster(name, known[name], each * nodes, each, exact=bool(count) or nodes > 1)
