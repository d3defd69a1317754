"""Accelerators as data: memory, bandwidth, FLOP/s and price of each (machines.yaml, or a user's file)."""

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
"""Default accelerators per node."""
KNOWN = Path(__file__).with_name("machines.yaml")


def _in(unit: str) -> Callable[[Any], float]:
    return lambda text: quantity(text, unit)


Bytes = Annotated[float, BeforeValidator(_in("B")), Field(gt=0)]
Rate = Annotated[float, BeforeValidator(_in("B/s")), Field(gt=0)]
Products = Annotated[float, BeforeValidator(_in("FLOP/s")), Field(gt=0)]
Share = Annotated[float, Field(gt=-1, allow_inf_nan=False)]
Watts = Annotated[float, BeforeValidator(_in("W")), Field(gt=0)]


def _written(value: Any) -> Any:
    """Returns a value of the YAML file as it is written there: a date, which YAML parses, as ISO text; others
    unchanged."""
    return value.isoformat() if isinstance(value, datetime.date) else value


class Price(Value):
    """Price of one accelerator-hour: a range of offers, with date and source."""

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
        """Parses "2.5USD". Raises RequestError for a price without a currency."""
        number, currency = text[:-3].strip(), text[-3:]
        if not (currency.isascii() and currency.isalpha() and currency.isupper()):
            raise RequestError(
                code="type", field="price", value=text, expected="an hour's price with its currency, 2.5USD"
            )
        value = quantity(number, field="price")
        return cls(low=value, high=value, currency=currency, date="as given", source="as given")


class TimeFactors(Value):
    """Ratios of measured to roofline seconds of training steps, by the kind of work (`planning/time.py`)."""

    products: float = Field(gt=0)
    scores: float = Field(gt=0)
    elementwise: float = Field(gt=0)
    links: float = Field(gt=0)
    error: tuple[Share, Share]
    """5th and 95th percentile of predicted / measured - 1, for models of sizes that were left out of the fit."""
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _ascends(self) -> TimeFactors:
        if self.error[0] > self.error[1]:
            raise ValueError(f"error={self.error} does not ascend; give the 5th percentile before the 95th")
        return self


class Machine(Value):
    """One accelerator: bytes, bytes per second, FLOP/s of dense matmuls by dtype, watts."""

    title: str
    memory: Bytes
    bandwidth: Rate
    peak: dict[str, Products]
    inside: Rate
    """Bandwidth to other accelerators of a node, bytes/s one way."""
    between: Rate
    """Bandwidth to other nodes, bytes/s one way."""
    power: Watts
    device: Literal["cuda", "cpu"] = "cuda"
    """Type of torch device whose kernels the machine runs."""
    source: str = Field(min_length=1)
    price: Price | None = None
    measured: TimeFactors | None = None
    """Measured factors of step times; if None, planned times are a range over the factors of all measured machines."""

    def peak_of(self, dtype: str) -> float:
        """Returns the FLOP/s of matmuls in a dtype. Raises RequestError if the machine has no matmuls in it."""
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
    """True if the user gave the number of accelerators."""

    def of(self, count: int) -> Cluster:
        """Returns a cluster of `count` accelerators of this kind, eight in a node."""
        return replace(self, count=count, node=min(count, NODE))

    @property
    def priced(self) -> str:
        """Machines in words, with price and source of the price."""
        price, machine = self.machine.price, self.machine
        words = f"on {self.count} {machine.title}" if self.count > 1 else f"on {machine.title}"
        if price is None:
            return words
        hour = f"{price.low:g}" if price.low == price.high else f"{price.low:g} to {price.high:g}"
        source = "" if price.source == "as given" else f" ({price.date}, {price.source})"
        return f"{words}, {hour} {price.currency} an hour{source}"


def span(low: float, high: float, cell: Callable[[float], str] = "{:.3g}".format, unit: str = "") -> str:
    """Formats the interval from `low` to `high`: each end by `cell`, then the unit."""
    return f"{cell(low)} to {cell(high)}{unit and ' '}{unit}"


def money(cost: tuple[float, float, str] | None) -> str:
    """Formats (least, most, currency) as an interval of prices; `no price known` for None."""
    if cost is None:
        return "no price known"
    return span(cost[0], cost[1], lambda value: f"{value:,.2f}" if value < 100 else f"{value:,.0f}", cost[2])


@cache
def _known() -> dict[str, Machine]:
    tree = yaml.safe_load(KNOWN.read_text(encoding="utf-8"))
    return {str(name): validated(Machine, fields, "machine", str(name)) for name, fields in tree.items()}


def machines(own: str | Path | None = None) -> dict[str, Machine]:
    """Returns every known machine by name; those of the file `own` replace built-in ones. Raises RequestError for an
    invalid file."""
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
    """Parses NAME or NAME:COUNT, COUNT in each of `nodes` nodes: "h100:8".

    Raises RequestError for an unknown machine, with the nearest known name."""
    name, _, count = text.partition(":")
    known = machines(own)
    check_machine(name, known)
    each = int(count) if count.isdecimal() and len(count) < 8 else 0 if count or ":" in text else 1
    if each < 1:
        raise RequestError(code="range", field="machine", value=text, expected="NAME:COUNT with a count from 1 up")
    if nodes < 1:
        raise RequestError(code="range", field="nodes", value=nodes, expected="a number of nodes from 1 up")
    return Cluster(name, known[name], each * nodes, each, exact=bool(count) or nodes > 1)
