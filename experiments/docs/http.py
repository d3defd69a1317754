"""The page of the server's routes, made of the bodies that the server checks."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.docs import escaped, plainly
from experiments.docs.guides import table
from glassformer.serving import guard
from glassformer.serving.body import Body
from glassformer.serving.operations import OPERATIONS, STATUSES, document, fields

NOTHING = {"null": "Only null is accepted.", "empty list": "Only an empty list is accepted."}
"""Meanings of fields without a value, by type."""


def page(made: str) -> str:
    """Returns the page."""
    pieces = [
        f"{made}# HTTP",
        "Routes of `glassformer serve` ([how to use them](../serving.md)). Bodies are JSON objects; unknown fields and "
        "other types are refused, and null means that a field is absent. The server gives this description as an "
        "OpenAPI document at `/openapi.json`.",
        table(
            ("route", "answer"),
            (
                (
                    f"`{one.method} {one.path}`",
                    plainly(one.summary) + (" `stream` sends events." if one.streams else ""),
                )
                for one in OPERATIONS
            ),
        ),
    ]
    for one in OPERATIONS:
        if one.body is not None:
            pieces += [f"## POST {one.path}", fields_table(one.body)]
    pieces += ["## Objects in bodies", *parts()]
    pieces += [
        "## Statuses",
        table(("status", "meaning"), ((str(status), escaped(words)) for status, words in STATUSES.items())),
        f"A body may have {guard.LARGEST_BODY >> 20} MiB and all headers {guard.LARGEST_HEADERS >> 10} KiB; each must "
        f"arrive within {guard.SECONDS_TO_READ:.0f} s. At most {guard.REQUESTS} requests are answered at once.",
    ]
    return "\n\n".join(pieces) + "\n"


def fields_table(body: type[Body]) -> str:
    """Returns a table of the fields of a body."""
    return table(
        ("field", "type", "meaning"),
        (
            (f"`{name}`", plainly(kind), plainly(words.replace("\n", " ") or NOTHING.get(kind, "")))
            for name, kind, words in fields(body)
        ),
    )


def parts() -> Iterator[str]:
    """Yields the sections of the objects that bodies hold."""
    bodies = {one.body for one in OPERATIONS}
    found: dict[str, type[Body]] = {}

    def collect(kind: type[Body]) -> None:
        for one in kind.__subclasses__():
            found[one.__name__] = one
            collect(one)

    collect(Body)
    for name in sorted(set(document()["components"]["schemas"]) & set(found)):
        if found[name] not in bodies:
            yield f"### {name}"
            yield (found[name].__doc__ or "").strip()
            yield fields_table(found[name])
