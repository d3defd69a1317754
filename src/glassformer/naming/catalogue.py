"""Catalogue of the names that an expression may use, a value that prints itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from rich.console import RenderableType

from glassformer.architectures import PRESETS
from glassformer.errors import RequestError, did_you_mean, shown
from glassformer.figures.terminal import Printed, ruled
from glassformer.names.known import FAMILIES
from glassformer.names.sizes import SIZES
from glassformer.naming.changes import changes, words
from glassformer.parts.core.words import Word


@dataclass(frozen=True)
class PresetCatalogue(Printed):
    """Presets, families, sizes and changes for expressions; with `word`, only those that contain it."""

    word: str = ""

    @classmethod
    def of(cls, word: str | None) -> Self:
        """Returns the catalogue of names that contain `word`, or for None of all names. Raises RequestError if no name
        does."""
        found = cls("" if word is None else word.lower().lstrip("+@"))
        if not (found.presets or any(found.changes.values())):
            known = [*PRESETS, *FAMILIES, *changes()]
            raise RequestError(
                f"no name or change contains {shown(repr(word))}{did_you_mean(found.word, known)}",
                code="unknown", field="word", value=word,
            )  # fmt: skip
        return found

    @property
    def presets(self) -> list[str]:
        """Names of published models that contain the word, or whose family does."""
        families = {published: family for family, published in FAMILIES.items()}
        return [name for name in PRESETS if self.word in name or self.word in families.get(name, "")]

    @property
    def changes(self) -> dict[str, list[Word]]:
        """Axis of the part that declares it -> short names of changes that contain the word."""
        return {axis: [one for one in some if self.word in f"{axis} {one}"] for axis, some in words().items()}

    def to_dict(self) -> dict[str, Any]:
        """Returns presets with their number of parameters, families with their preset, sizes, and changes, as plain
        values."""
        counts = {name: PRESETS[name]().num_params() for name in self.presets}
        families = {family: name for family, name in FAMILIES.items() if name in counts}
        short = [one.name for some in self.changes.values() for one in some]
        return {"presets": counts, "families": families, "sizes": SIZES, "changes": short}

    def lines(self) -> Iterator[str | RenderableType]:
        """Yields the catalogue for a terminal: a table of the presets, the sizes, and the changes by the part that
        declares them."""
        table = ruled()
        for heading in ("model", "parameters", "layers", "width", "family name"):
            table.add_column(heading)
        families = {published: family for family, published in FAMILIES.items()}
        for name in self.presets:
            config = PRESETS[name]()
            sizes = (f"{config.num_params():,}", str(config.n_layers), str(config.d_model))
            table.add_row(name, *sizes, families.get(name, ""))
        if self.presets:
            yield table
        if not self.word:
            yield "sizes: " + ", ".join(f"@{name}" for name in SIZES)
        yield "changes, by the part that declares them; a value is an example of its kind:"
        for axis, some in self.changes.items():
            if some:
                yield f"  {axis}: " + " ".join(f"+{word}" for word in some)
        yield "  any field: +path=value, such as +norm.eps=1e-6"
