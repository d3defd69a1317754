from __future__ import annotations

from collections.abc import Iterable

from glassformer.errors import RequestError


def among(names: Iterable[str], only: str | None) -> list[str]:
    """Those that `--only` asks for, by their beginnings, with commas (or semicolons) between; all for None. Raises
    RequestError for a beginning of none."""
    names = list(names)
    if only is None:
        return names
    asked = [one.strip() for one in only.split(";" if ";" in only else ",")]
    for one in asked:
        if not any(name.startswith(one) for name in names):
            raise RequestError(
                f"--only {one}: nothing is measured under that name; known: {'; '.join(names)}",
                code="unknown", field="only", value=one, expected="; ".join(names),
            )  # fmt: skip
    return [name for name in names if name.startswith(tuple(asked))]
