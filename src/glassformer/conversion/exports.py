"""Export targets of a model: the families that can hold it, and for every other the parts that block it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from glassformer.config import ModelConfig
from glassformer.conversion.families import FAMILIES
from glassformer.conversion.family import Blocked, Family
from glassformer.conversion.fields import Fields
from glassformer.errors import RequestError


@dataclass(frozen=True)
class ExportTarget:
    """A published family as a target of export, and the parts of a config that it cannot hold."""

    family: Family
    blocked_by: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Path in the config -> (the config's value, the family's value)."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of config.json; empty if blocked."""
    whole: bool = True
    """False if `blocked_by` may be incomplete, because a part that the family has no field for ended the search."""

    @property
    def supported(self) -> bool:
        return not self.blocked_by

    @property
    def blockers(self) -> dict[str, tuple[Any, Any]]:
        """`blocked_by` in short, in the same form: a part of another kind is listed without its fields, and a part that
        differs in several blocks once."""
        kinds = {path.removesuffix(".kind") for path in self.blocked_by if path.endswith(".kind")}
        short: dict[str, tuple[Any, Any]] = {}
        for path, both in self.blocked_by.items():
            parts = path.removesuffix(".kind")
            if parts in kinds and not path.endswith(".kind"):
                continue  # absent on one side: the kind tells
            if not path.endswith(".kind") and any(path.startswith(f"{kind}.") for kind in kinds):
                continue
            short.setdefault(re.sub(r"^stack\.\d+\.blocks\.\d+\.", "", parts), both)
        return short


def export_target(config: ModelConfig, family: Family) -> ExportTarget:
    """Returns the family with the fields of `config` that block it: those that differ after the config is written as
    the family's config.json and read back. Reparametrised matrices block no family, as they are folded before writing.
    """
    mine = config.replace(reparam=None).resolved()
    try:
        fields = family.write(mine)
        theirs = family.config(Fields(fields)).resolved()
    except Blocked as reason:
        return ExportTarget(family, {path: (value, None) for path, value in reason.parts.items()}, whole=False)
    except RequestError as reason:
        return ExportTarget(family, {"config": (str(reason).splitlines()[0], None)}, whole=False)
    blocked_by = mine.diff(theirs)
    return ExportTarget(family, blocked_by, {} if blocked_by else fields)


def export_targets(config: ModelConfig) -> list[ExportTarget]:
    """Returns all families as export targets: supported ones first, then by number of blockers; last those with `whole`
    False."""
    return list(_targets(config))


@lru_cache(maxsize=4)
def _targets(config: ModelConfig) -> tuple[ExportTarget, ...]:
    seen = (export_target(config, family) for family in FAMILIES.values())
    return tuple(sorted(seen, key=lambda one: (not one.whole, len(one.blockers))))


def family_of(config: ModelConfig) -> ExportTarget | None:
    """Returns the first published family that can hold the config; None if no family can."""
    targets = (export_target(config, family) for family in FAMILIES.values())
    return next((target for target in targets if target.supported), None)
