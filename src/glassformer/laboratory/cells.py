"""Trained runs as points of a law: one for each run of the comparisons in a folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassformer.errors import RequestError
from glassformer.figures.plain import plain
from glassformer.naming import parse, without_size
from glassformer.runs.files import RESULTS, read_results
from glassformer.runs.results import RunResult

CELLS = "cells"
"""Folder of the comparisons of a grid, one for each size and budget."""


@dataclass(frozen=True)
class CellRun:
    """A trained run as a data point for a scaling law.

    Attributes
    ----------
    model, size
        Expression without its size, and the size.
    cell
        Name of the size and budget.
    run
        Cell and seed. The bootstrap draws runs of several models with equal cell and seed together.
    params
        Parameters of the layers, without the embedding.
    flops
        Training FLOPs as they were counted.
    loss
        Loss on held-out text; None of a run that diverged or failed.
    """

    model: str
    size: str
    cell: str
    seed: int
    run: str
    params: int
    tokens: int
    flops: float
    loss: float | None
    status: str
    error: str | None
    seconds: float | None

    @property
    def row(self) -> dict[str, Any]:
        """The run as a table row that the function `points` reads, in which a missing loss is NaN."""
        return {**plain(self), "loss": math.nan if self.loss is None else self.loss}


def runs_of(folder: Path) -> list[CellRun]:
    """Returns the trained runs of the comparisons in `folder`, which `scale` or `compare` has written. Raises
    RequestError if it holds no runs."""
    places = [path.parent for path in sorted(folder.glob(f"{CELLS}/*/{RESULTS}"))]
    places += [folder] if (folder / RESULTS).is_file() else []
    found = [_point(run, place.name) for place in places for run in _runs(place)]
    if not found:
        raise RequestError(
            f"{folder} holds no results of runs; name the folder of a scale or a compare, or a .csv file",
            code="missing", field="data", value=str(folder), expected="a folder with runs",
        )  # fmt: skip
    return found


def _runs(place: Path) -> list[RunResult]:
    found = read_results(place)
    return [] if found is None else found.runs


def _point(run: RunResult, cell: str) -> CellRun:
    tokens = 0 if run.train is None else run.train.tokens
    return CellRun(
        model=without_size(run.name), size=parse(run.name)[1] or "", cell=cell, seed=run.seed,
        run=f"{cell} seed {run.seed}", params=run.parameters_without_embeddings or 0, tokens=tokens,
        flops=(run.flops_per_token or 0) * tokens,
        loss=run.validation.loss if run.status == "ok" and run.validation is not None else None,
        status=run.status, error=run.error, seconds=None if run.train is None else run.train.seconds,
    )  # fmt: skip
