"""Reader and writer of results.json and result.json.

FOLDER/results.json                     `Results`
FOLDER/runs/NAME-seedN/result.json      `RunResult`, an entry of `Results.runs`, with the version
"""

from __future__ import annotations

import json
from pathlib import Path

from glassformer.errors import RequestError
from glassformer.files import check_schema, replace_text
from glassformer.runs.results import VERSION, Results, RunResult

RESULTS, RESULT = "results.json", "result.json"


def read_results(folder: Path) -> Results | None:
    """Returns the results of a folder; None without results. Raises RequestError if the file is of another version, or
    not of a comparison."""
    path = folder / RESULTS
    if not path.exists():
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(tree, dict) and "runs" in tree:
            check_schema("results", tree.get("schema"), path)
        return Results.of(tree)
    except RequestError:
        raise
    except (OSError, ValueError, RecursionError):  # also of pydantic
        message = f"--out {folder} holds a results.json that is not of a comparison; name another folder"
        raise RequestError(message, code="damaged", field="out", value=str(folder)) from None


def write_results(results: Results, folder: Path) -> None:
    """Replaces results.json atomically."""
    replace_text(folder / RESULTS, json.dumps(results.to_dict(), indent=1, allow_nan=False))


def read_result(place: Path) -> RunResult | None:
    """Returns the result that a trained run left in its folder; None without a complete one."""
    try:
        tree = json.loads((place / RESULT).read_text(encoding="utf-8"))
        json.dumps(tree, allow_nan=False)  # it will be written again
        if isinstance(tree, dict) and tree.pop("schema", VERSION) != VERSION:
            return None
        result = RunResult.of(tree)
    except (OSError, ValueError, RecursionError):  # also of pydantic
        return None
    return result if result.complete else None


def write_result(result: RunResult, place: Path) -> None:
    """Replaces the result.json of a run atomically."""
    replace_text(place / RESULT, json.dumps({"schema": VERSION, **result.to_dict()}, allow_nan=False))
