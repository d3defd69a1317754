"""Trained runs as rows: what the comparisons in a folder found, one row for each run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from glassformer.errors import RequestError
from glassformer.naming import parse, without_size
from glassformer.runs.files import RESULTS, read_results
from glassformer.runs.results import RunResult

CELLS = "cells"
"""Folder of the comparisons of a grid, one for each size and budget."""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Rows of the runs in `folder`, which `scale` or `compare` has written: `model` without its size, `params` of the
    layers, without the embedding, `tokens`, `flops` as they were counted, `loss` on held-out text (NaN of a run that
    diverged or failed). Raises RequestError where no run is there."""
    places = [path.parent for path in sorted(folder.glob(f"{CELLS}/*/{RESULTS}"))]
    places += [folder] if (folder / RESULTS).is_file() else []
    rows = [_row(run, place.name) for place in places for run in _runs(place)]
    if not rows:
        raise RequestError(
            f"{folder} holds no results of runs; name the folder of a scale or a compare, or a .csv file",
            code="missing", field="data", value=str(folder), expected="a folder with runs",
        )  # fmt: skip
    return rows


def _runs(place: Path) -> list[RunResult]:
    found = read_results(place)
    return [] if found is None else found.runs


def _row(run: RunResult, cell: str) -> dict[str, Any]:
    tokens = 0 if run.train is None else run.train.tokens
    fine = run.status == "ok" and run.validation is not None
    return {
        "model": without_size(run.name), "size": parse(run.name)[1] or "", "cell": cell, "seed": run.seed,
        "run": f"{cell} seed {run.seed}", "params": run.parameters_without_embeddings or 0, "tokens": tokens,
        "flops": (run.flops_per_token or 0) * tokens,
        "loss": run.validation.loss if fine and run.validation is not None else math.nan,
        "status": run.status, "error": run.error, "seconds": None if run.train is None else run.train.seconds,
    }  # fmt: skip
