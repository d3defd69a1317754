"""Names that an expression may use, as a value that prints itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from glassformer.architectures import FAMILIES, PRESETS
from glassformer.figures.terminal import Printed, ruled
from glassformer.naming.changes import changes, words
from glassformer.naming.sizes import SIZES


@dataclass(frozen=True)
class PresetCatalogue(Printed):
    """Presets, families, sizes and changes that expressions are made of."""

    def to_dict(self) -> dict[str, Any]:
        """Returns presets with their parameters, families with their presets, sizes, and changes."""
        counts = {name: make().num_params() for name, make in PRESETS.items()}
        return {"presets": counts, "families": FAMILIES, "sizes": SIZES, "changes": changes()}

    def lines(self) -> Iterator[str | RenderableType]:
        """Yields a table of the presets, the sizes, and the changes by the part that declares them."""
        table = ruled()
        for heading in ("model", "parameters", "layers", "width", "family name"):
            table.add_column(heading)
        families = {published: family for family, published in FAMILIES.items()}
        for name, make in PRESETS.items():
            config = make()
            sizes = (f"{config.num_params():,}", str(config.n_layers), str(config.d_model))
            table.add_row(name, *sizes, families.get(name, ""))
        yield table
        yield "sizes: " + ", ".join(f"@{name}" for name in SIZES)
        yield "changes, by the part that declares them; a value is an example of its kind:"
        for axis, some in words().items():
            yield f"  {axis}: " + " ".join(f"+{word}" for word in some)
        yield "  any field: +path=value, such as +norm.eps=1e-6"
