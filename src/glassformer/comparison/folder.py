"""Checks of the output folder: an earlier comparison is continued or refused, never overwritten."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from glassformer.config import first_difference
from glassformer.errors import RequestError, shown
from glassformer.files import refuse_foreign
from glassformer.parts.core.outside import FILE as SOURCES
from glassformer.parts.core.outside import check_sources
from glassformer.runs.files import read_results
from glassformer.runs.request import REQUEST, RunRequest, read_request
from glassformer.runs.results import Budget, Data

WRITTEN = ("report.html", "tokenizer", "design.yaml", "runs", SOURCES)
"""Files of a comparison in addition to results.json, which is written first"""
BUDGET = ("match", "tokens", "flops", "minutes", "batch_size", "context")


def check_comparison(folder: Path, names: Collection[str], budget: Budget) -> None:
    """Raises RequestError if the folder holds files that are not a comparison's, or a comparison without any of the
    models `names` or under another budget. Reads no text and writes nothing."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise RequestError(
                f"--out {folder}: {place} is a file; name a folder", code="exists", field="out", value=str(folder)
            )
    refuse_other_files(folder)
    held = read_results(folder)
    if held is None:
        return
    there = held.names
    if there and not set(there) & set(names):
        raise RequestError(
            f"--out {folder} holds a comparison of {shown(' '.join(there))}; name another folder, or ask for one of "
            f"these as well",
            code="exists", field="out", value=str(folder),
        )  # fmt: skip
    for key in (key for key in BUDGET if key in held.budget.model_fields_set):
        was, now = getattr(held.budget, key), getattr(budget, key)
        if was != now:
            raise _another(f"--out {folder} holds a comparison with another budget", (key, was, now))


def refuse_other_files(folder: Path) -> None:
    """Raises RequestError if the folder does not hold a comparison but has files with names that a comparison
    writes."""
    ours = read_results(folder) is not None or any(folder.glob(f"runs/*/{REQUEST}"))
    refuse_foreign(folder, *WRITTEN, ours=ours)


def seeds_before(folder: Path) -> int:
    """Returns the number of seeds of the comparison in the folder; 0 if it holds none."""
    held = read_results(folder)
    return 0 if held is None else held.budget.seeds or 0


def speeds_before(folder: Path, names: Collection[str]) -> dict[str, float]:
    """Returns the speeds {model: tokens per second} that the comparison in the folder measured in turn; {} unless they
    are of all models `names`."""
    held = read_results(folder)
    return {} if held is None or not held.speeds.keys() >= {*names} else held.speeds


def check_looks(folder: Path, planned: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns (numbers of seeds at which verdicts were read earlier, planned numbers, by default those of the earlier
    plan). Raises RequestError if a verdict has been read and the plan differs from the earlier one."""
    held, plan = read_results(folder), sorted(set(planned))
    if held is None:
        return [], plan
    seen = list(held.looks)
    if plan and seen and plan != held.planned_looks:
        raise RequestError(
            f"--looks {','.join(map(str, plan))}: verdicts were seen at {' and '.join(map(str, seen))} seeds before "
            "this plan; continue without it, or start in another folder",
            code="conflict", field="looks", value=plan, expected="a plan from before the first verdict",
        )  # fmt: skip
    return seen, plan or list(held.planned_looks)


def check_runs(folder: Path, requests: Collection[RunRequest], text: Data) -> None:
    """Raises RequestError if the folder holds a comparison on another text, runs of a requested model (of any seed)
    with another config, recipe or initial weights, finished runs of parts whose source has changed, or finished runs
    that are not requested."""
    held = read_results(folder)
    if held is not None:
        for what, was, now in (
            ("text", held.data.fingerprint, text.fingerprint),
            ("tokenizer", held.data.tokenizer_fingerprint, text.tokenizer_fingerprint),
        ):
            if was not in (None, now):
                on = shown(held.data.name)
                raise RequestError(
                    f"--out {folder} holds a comparison with another {what}, on {on}; name another folder",
                    code="changed", field=f"data.{what}",
                )  # fmt: skip
    asked = {request.name: request.identity for request in requests}
    runs = (
        []
        if held is None
        else [{"name": r.name, "config": r.config, "recipe": r.recipe, "pretrained": r.pretrained} for r in held.runs]
    )
    for run in [*runs, *_begun(folder, {request.place(folder): request.name for request in requests})]:
        if (wanted := asked.get(str(run.get("name")))) is not None:
            _refuse_another(folder, run, wanted)
    sources = {request.name: request.sources for request in requests}
    for entry in [] if held is None else held.runs:
        if entry.status != "failed" and entry.name in sources:
            hashes = {name: source.sha256 for name, source in entry.sources.items()}
            check_sources(hashes, f"the runs of {entry.name} in --out {folder}")
    keys = {request.key for request in requests}
    for entry in [] if held is None else held.runs:
        if entry.status != "failed" and entry.key not in keys:
            raise RequestError(
                f"--out {folder} also holds {shown(entry.name)}, seed {entry.seed}, which would be missing from the "
                f"report; ask for it as well, or name another folder",
                code="missing", field="models", value=entry.name,
            )  # fmt: skip


def _refuse_another(folder: Path, run: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in ("config", "recipe", "tokens"):
        change = first_difference(run[key], wanted[key], besides=("seed",)) if run.get(key) else None
        if change is not None:
            raise _another(f"--out {folder} holds a run of {wanted['name']} with another {key}", change)
    if run.get("config") and run.get("pretrained") != wanted.get("pretrained"):
        raise RequestError(
            f"--out {folder} holds a run of {wanted['name']} that started from other weights; name another folder",
            code="conflict", field="pretrained", value=wanted.get("pretrained"),
        )  # fmt: skip


def compiled_before(folder: Path) -> bool | None:
    """Returns True if the earlier runs in the folder were compiled, False if not; None if it has no runs, or they do
    not record it."""
    found = (request.get("recipe") for request in _begun(folder, {}))
    return next((recipe["compile"] for recipe in found if isinstance(recipe, dict) and "compile" in recipe), None)


def threads_before(folder: Path) -> tuple[int | None, bool] | None:
    """Returns (number of threads of the earlier runs in the folder, None for the default; True if they shared a
    device); None if it has no runs."""
    held = read_results(folder)
    ended = [] if held is None else [(run.recipe, run.machine.shared) for run in held.runs]
    begun = [(request.get("recipe"), request.get("shared") is True) for request in _begun(folder, {})]
    found = [(recipe.get("threads"), shared) for recipe, shared in [*ended, *begun] if isinstance(recipe, dict)]
    return (found[0][0], any(shared for _, shared in found)) if found else None


def _begun(folder: Path, places: dict[Path, str]) -> Iterator[dict[str, Any]]:
    """Yields the content of request.json of every run in the folder. `places` is {folder of a requested run: its
    model's name}; if request.json in such a folder is unreadable or names another model, RequestError is raised."""
    for path in sorted(folder.glob(f"runs/*/{REQUEST}")):
        request = read_request(path.parent)
        name = request.get("name")
        if (needed := places.get(path.parent, name)) != name:
            raise RequestError(
                f"--out {folder}: {path} is not of a run of {needed}; name another folder", code="damaged", field="out"
            )
        yield request


def _another(what: str, change: tuple[str, Any, Any]) -> RequestError:
    path, was, now = (shown(word) for word in change)
    return RequestError(
        f"{what}: {path} was {was} and is now {now}; name another folder", code="changed", field=path, value=now
    )
