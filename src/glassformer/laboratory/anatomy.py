"""Parts and costs of a model, counted without building it, and its differences from another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import RenderableType

from glassformer.config import ModelConfig
from glassformer.figures import Markup, document, join, plain_table, tag
from glassformer.figures.terminal import Reported, ruled, size, unbroken
from glassformer.laboratory.steps import setting
from glassformer.naming.changes import JOIN, word_of
from glassformer.planning.counts import Counts, component_table
from glassformer.runs.diff import differences, plain_name, value_at

BLOCK = re.compile(r"^stack\.\d+\.blocks\.\d+\.")
"""Prefix of the path of a field of a block."""


@dataclass(frozen=True)
class Anatomy(Reported):
    """Parts of a model and their costs, and its differences from another.

    Attributes
    ----------
    name : str
        Text or path that names the model, or the class of its value.
    config : ModelConfig
        The model.
    other_name, other : str and ModelConfig, or None
        Another model, whose different fields are shown.
    """

    name: str
    config: ModelConfig
    other_name: str | None = None
    other: ModelConfig | None = None

    @cached_property
    def counts(self) -> Counts:
        """Parameters by component, with their formulas."""
        return Counts(self.config)

    @cached_property
    def difference(self) -> dict[str, tuple[Any, Any]]:
        """Path of each config field that differs -> its values in this model and in the other; empty if the models are
        equal."""
        return {} if self.other is None else self.config.diff(self.other)

    @cached_property
    def ideas(self) -> list[tuple[str, str, str, str]]:
        """Parts that differ: name, this model's part, the other's, and the change that puts in the other's."""
        if self.other is None:
            return []
        trees = [self.config.to_dict(), self.other.to_dict()]
        alone = all(len(config.stack) == 1 and len(config.stack[0].blocks) == 1 for config in (self.config, self.other))
        rows = []
        for one in differences(trees):
            word = _change(one.path, value_at(trees[1], one.path), alone)
            mine, theirs = ("–" if value is None else value for value in one.values)
            rows.append((plain_name(one.path, alone), mine, theirs, "" if word is None else f"+{word}"))
        return rows

    @property
    def summary(self) -> list[str]:
        """Sentences on parameters, FLOPs and decode state."""
        config = self.config
        own, active = config.num_params(embeddings=False), config.active_params(embeddings=False)
        share = "" if active == own else f" ({active:,} for each token)"
        flops, state = config.flops(config.context), config.state_bytes(config.context) / config.context
        return [
            f"{self.name}: {config.num_params():,} parameters, {own:,} without embeddings{share}",
            f"{flops:.4g} FLOPs per token forward at {config.context} tokens, all pairs counted",
            f"{size(state)} of decode state per token in 16 bits",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns counts, the config, and with another model `diff`, as plain values."""
        config = self.config
        difference = {path: list(both) for path, both in self.difference.items()}
        return {
            "name": self.name,
            "parameters": config.num_params(),
            "parameters_without_embeddings": config.num_params(embeddings=False),
            "active_parameters": config.active_params(),
            "forward_flops_per_token": config.flops(config.context),
            "state_bytes_per_token": config.state_bytes(config.context) / config.context,
            "components": {row.name: row.parameters for row in self.counts.components},
            "config": config.to_dict(),
            **({} if self.other is None else {"ideas": self._rows(), "diff": difference}),
        }

    def _rows(self) -> list[dict[str, str]]:
        return [dict(zip(("part", "this", "other", "change"), row, strict=True)) for row in self.ideas]

    def lines(self) -> Iterator[str | RenderableType]:
        """Yields the printed text: with another model the parts and fields that differ, otherwise the counts and the
        config as YAML."""
        if self.other is None:
            yield from self.summary
            yield ""
            yield component_table(self.counts.components)
            yield ""
            yield unbroken(self.config.to_yaml().removesuffix("\n"))
        elif not self.difference:
            yield f"{self.name} and {self.other_name} are equal"
        else:
            yield self._table("part", self.ideas, "change")
            yield "by field:"
            yield self._table("field", [(path, str(a), str(b)) for path, (a, b) in self.difference.items()])

    def _table(self, first: str, rows: Sequence[Sequence[str]], *more: str) -> RenderableType:
        table = ruled()
        for heading in (first, self.name, self.other_name or "", *more):
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*row)
        return table

    def _repr_html_(self) -> str:
        """Returns HTML for a notebook: the counts and a table of the parts; with another model, also tables of the
        parts and the fields in which the two models differ."""
        rows = [(path, str(mine), str(theirs)) for path, (mine, theirs) in self.difference.items()]
        names = (self.name, self.other_name or "")
        ideas = plain_table("Differences", ("part", *names, "change"), self.ideas) if self.other else ""
        other = plain_table("By field", ("field", *names), rows) if self.other else ""
        return tag(
            "div", join(tag("p", line) for line in self.summary), Markup(self.config._repr_html_()), ideas, other
        )

    def html(self) -> str:
        """Returns the notebook's view of the anatomy as an HTML page."""
        return document(self.name, tag("h1", self.name), Markup(self._repr_html_()))


def _change(path: str, value: Any, alone: bool) -> str | None:
    """Returns the change of a model's expression that sets the value at a path of the config; None if no change does.
    `alone`: True if all layers have one kind of block, so that a change of every block sets it."""
    field = BLOCK.sub("", path) if alone else path
    last = field.rpartition(".")[2]
    if isinstance(value, dict):
        everywhere = alone or field != path or not path.startswith("stack")
        return word_of("norm" if last == "final_norm" else last, value) if everywhere else None
    return None if isinstance(value, list) or (value is None and last in JOIN) else f"{field}={setting(value)}"
