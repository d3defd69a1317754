"""Parts and costs of a model, counted without building it, and its differences from another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import RenderableType

from glassformer.config import ModelConfig
from glassformer.figures import Markup, document, join, plain_table, tag
from glassformer.figures.terminal import Reported, ruled, size, unbroken
from glassformer.planning.counts import Counts, component_table


@dataclass(frozen=True)
class Anatomy(Reported):
    """Parts of a model and their costs.

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
        """Path of a field -> its values in this model and in the other; empty if the models are equal."""
        return {} if self.other is None else self.config.diff(self.other)

    @property
    def summary(self) -> list[str]:
        """Parameters, FLOPs and decode state, a sentence each."""
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
            **({} if self.other is None else {"diff": difference}),
        }

    def lines(self) -> Iterator[str | RenderableType]:
        """Yields the different fields, or without another model the counts and the config as YAML."""
        if self.other is None:
            yield from self.summary
            yield ""
            yield component_table(self.counts.components)
            yield ""
            yield unbroken(self.config.to_yaml().removesuffix("\n"))
        elif not self.difference:
            yield f"{self.name} and {self.other_name} are equal"
        else:
            table = ruled()
            for heading in ("field", self.name, self.other_name or ""):
                table.add_column(heading, overflow="fold")
            for path, (mine, theirs) in self.difference.items():
                table.add_row(path, str(mine), str(theirs))
            yield table

    def _repr_html_(self) -> str:
        """In a notebook: the counts, a table of the parts, and the different fields."""
        rows = [(path, str(mine), str(theirs)) for path, (mine, theirs) in self.difference.items()]
        other = plain_table("Differences", ("field", self.name, self.other_name or ""), rows) if self.other else ""
        return tag("div", join(tag("p", line) for line in self.summary), Markup(self.config._repr_html_()), other)

    def html(self) -> str:
        """Returns the notebook's view as a page."""
        return document(self.name, tag("h1", self.name), Markup(self._repr_html_()))
