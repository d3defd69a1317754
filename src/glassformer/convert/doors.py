"""Which doors are open to a model: the families that can hold it, and the part that closes each of the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

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

    @property
    def open(self) -> bool:
        return not self.closed_by


def door(config: ModelConfig, family: Family) -> Door:
    """Writes the config in the family's words and reads it back: what does not return is what closes the door."""
    mine = config.explicit()
    try:
        fields = family.write(mine)
        theirs = family.read(Fields(fields)).explicit()
    except Closed as reason:
        return Door(family, {path: (value, None) for path, value in reason.parts.items()})
    except (RequestError, ValidationError) as reason:
        return Door(family, {"config": (str(reason).splitlines()[0], None)})
    closed_by = mine.diff(theirs)
    return Door(family, closed_by, {} if closed_by else fields)


def doors(config: ModelConfig) -> list[Door]:
    """Every family's door, open ones first, then by how little closes them."""
    return sorted((door(config, family) for family in FAMILIES.values()), key=lambda one: len(one.closed_by))


def family_of(config: ModelConfig) -> Door | None:
    """The first open door."""
    return next((one for one in (door(config, family) for family in FAMILIES.values()) if one.open), None)
