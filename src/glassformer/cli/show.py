"""Output of results on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from glassformer.cli import waiting
from glassformer.errors import WorkError
from glassformer.figures.terminal import Printed, output
from glassformer.runs.live import ComparisonView


def show(value: Printed, as_json: bool) -> None:
    """Prints a result of the library as its text, or as JSON. Raises WorkError if the result is a failure."""
    print_result(value, as_json)
    try:
        value.check()
    except WorkError as problem:
        problem.reported = as_json
        raise


def print_result(value: Printed, as_json: bool, **more: Any) -> None:
    """Prints a result as its text, or as JSON with the additional fields `more`."""
    waiting.end()
    if as_json:
        fields = value.to_dict()
        if more:
            fields = {**(fields if isinstance(fields, dict) else {"results": fields}), **more}
        print(json.dumps(fields, allow_nan=False))
    elif value.raw:
        sys.stdout.writelines(f"{line}\n" for line in value.lines())
    else:
        output().print(value, crop=False)
    sys.stdout.flush()


def show_line(fields: dict[str, Any]) -> None:
    """Prints a dict as one line of JSON and flushes it."""
    waiting.end()
    print(json.dumps(fields, allow_nan=False), flush=True)


def call_and_show(verb: Callable[..., Printed], *inputs: Any, as_json: bool, **options: Any) -> None:
    """Calls a verb of the library with its progress on standard error, and prints its result. Options without a value
    keep the verb's defaults. Raises WorkError if the work failed."""
    given = {name: value for name, value in options.items() if value is not None}
    waiting.end()
    with ComparisonView(quiet=as_json) as view:
        value = verb(*inputs, progress=view.event, **given)
    show(value, as_json)
