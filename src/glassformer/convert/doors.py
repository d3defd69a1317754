"""Which doors are open to a model: the families that can hold it, and the part that closes each of the others."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from glassformer.config import ModelConfig
from glassformer.convert.families import FAMILIES
from glassformer.convert.family import Closed, Family
from glassformer.convert.fields import Fields
from glassformer.errors import RequestError


@dataclass(frozen=True)
class Door:
    """One family, seen from one config."""

    family: Family
    closed_by: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Path in the config -> (its value, the value that the family would have)."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Of config.json; empty where closed."""
    whole: bool = True
    """Whether `closed_by` is all that closes it; where a part has no words at all in the family, no more is seen."""

    @property
    def open(self) -> bool:
        return not self.closed_by

    @property
    def closers(self) -> dict[str, tuple[Any, Any]]:
        """`closed_by` in short: a part of another kind stands for its fields, a block for those like it."""
        kinds = {path.removesuffix(".kind") for path in self.closed_by if path.endswith(".kind")}
        short: dict[str, tuple[Any, Any]] = {}
        for path, both in self.closed_by.items():
            parts = path.removesuffix(".kind")
            if parts in kinds and not path.endswith(".kind"):
                continue  # absent on one side: the kind says it
            if not path.endswith(".kind") and any(path.startswith(f"{kind}.") for kind in kinds):
                continue
            short.setdefault(re.sub(r"^stack\.\d+\.blocks\.\d+\.", "", parts), both)
        return short


def door(config: ModelConfig, family: Family) -> Door:
    """Writes the config in the family's words and reads it back: what does not return is what closes the door.
    Reparametrised matrices close none, as they are folded before they are written."""
    mine = config.vary(reparam=None).explicit()
    try:
        fields = family.write(mine)
        theirs = family.config(Fields(fields)).explicit()
    except Closed as reason:
        return Door(family, {path: (value, None) for path, value in reason.parts.items()}, whole=False)
    except RequestError as reason:
        return Door(family, {"config": (str(reason).splitlines()[0], None)}, whole=False)
    closed_by = mine.diff(theirs)
    return Door(family, closed_by, {} if closed_by else fields)


def doors(config: ModelConfig) -> list[Door]:
    """Every family's door, open ones first, then by how little closes them; last, where not all of that is known."""
    seen = (door(config, family) for family in FAMILIES.values())
    return sorted(seen, key=lambda one: (not one.whole, len(one.closers)))


def family_of(config: ModelConfig) -> Door | None:
    """The first open door."""
    return next((one for one in (door(config, family) for family in FAMILIES.values()) if one.open), None)
