"""Results on standard output."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from glassformer.cli import waiting
from glassformer.errors import WorkError
from glassformer.figures.terminal import Printed, output
from glassformer.runs.live import ComparisonView


def show(value: Printed, as_json: bool) -> None:
    """Prints a value of the library on standard output: as its text, or as JSON. Raises WorkError if it failed."""
    waiting.end()
    if as_json:
        print(json.dumps(value.to_dict(), allow_nan=False))
    else:
        output().print(value, crop=False)
    try:
        value.check()
    except WorkError as problem:
        problem.reported = as_json
        raise


def show_line(fields: dict[str, Any]) -> None:
    """Prints one line of JSON at once."""
    waiting.end()
    print(json.dumps(fields, allow_nan=False), flush=True)


def call_and_show(verb: Callable[..., Printed], *inputs: Any, as_json: bool, **options: Any) -> None:
    """Calls a verb of the library with its progress on standard error, and prints its value. Options
    without a value keep the defaults of the verb. Raises WorkError if the work failed."""
    given = {name: value for name, value in options.items() if value is not None}
    waiting.end()
    with ComparisonView(quiet=as_json) as view:
        value = verb(*inputs, progress=view.event, **given)
    show(value, as_json)
