"""Parts that stand outside this package: they register when their module is imported, or are installed with a package
that names the module as an entry point of the group `glassformer.parts`."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from glassformer.errors import RequestError, shown

GROUP = "glassformer.parts"


@cache
def load_installed() -> tuple[str, ...]:
    """Imports the modules of the group's entry points, once in a process, and returns their names. Raises RequestError
    for one that cannot be imported."""
    names = []
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else "an installed package"
            raise RequestError(
                f"{package} offers parts in {entry.value}, which cannot be imported: {shown(error, 200)}",
                code="broken_entry_point", field=GROUP, value=entry.value,
            ) from error  # fmt: skip
        names.append(entry.value)
    return tuple(names)
