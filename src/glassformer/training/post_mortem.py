"""`gf.why`: from the files of a run to a `Diagnosis`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from glassformer.config import ModelConfig
from glassformer.dynamics import Diagnosis, diagnose, read_records
from glassformer.dynamics.records import NAME
from glassformer.errors import RequestError
from glassformer.parts.core.base import to_plain
from glassformer.training.progress import read_metrics
from glassformer.training.recipe import Recipe
from glassformer.training.remedy import remedy
from glassformer.training.trained import Run
from glassformer.typed import typed

METRICS = "metrics.jsonl"
MOST_BYTES = 1 << 29


@typed
def why(run: str | Path | Run) -> Diagnosis:
    """Returns why a run failed: what moved first, the known failure that matches, and what to try.

    Parameters
    ----------
    run
        A run folder (best of a run trained with `watch`), the folder of a comparison's arm, or a `Run`.

    Returns
    -------
    Diagnosis
        Verdict, causes with their confidence, statistics that moved, notes. The verdict of a healthy run is "nothing
        wrong".

    Raises
    ------
    RequestError
        If the folder holds no run, or the run has made no step.

    Examples
    --------
    >>> import glassformer as gf
    >>> print(gf.why("runs/llama"))  # doctest: +SKIP
    """
    if isinstance(run, Run):
        if run.folder is None:
            return diagnose(run.metrics, [], run.config, to_plain(run.recipe))
        run = run.folder
    folder = run_folder(Path(run))
    if (folder / METRICS).stat().st_size > MOST_BYTES:
        raise RequestError(
            f"{folder / METRICS} is larger than the {MOST_BYTES:,} bytes that are read",
            code="range", field="run", value=str(run),
        )  # fmt: skip
    config, recipe = ModelConfig.from_file(folder / "config.yaml"), Recipe.from_file(folder / "recipe.yaml")
    records = read_records(folder / NAME)
    found = diagnose(read_metrics(folder / METRICS), records, config, to_plain(recipe))
    notes = []
    if records.skipped:
        notes.append(f"{records.skipped:,} lines of {folder / NAME} are not rows, and were left out")
    if records.left_out:
        notes.append(f"the first {records.left_out:,} bytes of {folder / NAME} were left out")
    command = remedy(folder, found.causes[0].tries) if found.causes else ""
    return replace(found, name=str(folder), notes=(*found.notes, *notes), command=command)


def run_folder(path: Path) -> Path:
    """Returns the run folder: the path itself, or its folder `run` if the path is the folder of an arm."""
    for folder in (path, path / "run"):
        if (folder / METRICS).is_file():
            return folder
    if not path.is_dir():
        raise RequestError(f"run folder {path} does not exist", code="missing", field="run", value=str(path))
    if arms := sorted(arm.parents[1].name for arm in path.glob(f"runs/*/run/{METRICS}"))[:5]:
        raise RequestError(
            f"{path} is a comparison; name one of its runs, such as {path / 'runs' / arms[0]}",
            code="conflict", field="run", value=str(path),
        )  # fmt: skip
    raise RequestError(
        f"{path} is not a run folder: {METRICS} is missing; name the folder that `glassformer train --out` wrote",
        code="missing", field="run", value=str(path),
    )  # fmt: skip
