"""The folder of a comparison: where its runs lie, and what there must not be written over."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from glassformer.comparison.result import read_results
from glassformer.config import ModelConfig, first_difference
from glassformer.errors import RequestError, shown
from glassformer.training import Recipe

WRITTEN = ("report.html", "tokenizer")
"""What a comparison writes besides results.json, which comes first and says whose they are."""
BUDGET = ("match", "tokens", "flops", "minutes", "batch_size", "context")
TEXT = {"fingerprint": "text", "tokenizer_fingerprint": "tokenizer"}


def place_of(folder: Path, name: str, seed: int) -> Path:
    """Where the run of an EXPR lies."""
    plain = re.sub(r"[^A-Za-z0-9.@+_=-]+", "_", name)[:80]  # readable, and different for different names
    slug = plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return folder / "runs" / f"{slug}-seed{seed}"


def check_comparison(folder: Path, names: Collection[str], budget: dict[str, Any]) -> None:
    """Raises RequestError for a folder that holds something else than a comparison, or one that this would not add to:
    of other models, or under another budget. Reads no text, writes nothing."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise RequestError(f"--out {folder}: {place} is a file; name a folder")
    held = read_results(folder)
    if held is None:
        strange = [name for name in WRITTEN if (folder / name).exists()]
        if strange and not any(folder.glob("runs/*/request.json")):
            raise RequestError(
                f"--out {folder} holds {' and '.join(strange)}, and is no comparison; name another folder"
            )
        return
    there = held.names
    if there and not set(there) & set(names):
        raise RequestError(
            f"--out {folder} holds a comparison of {shown(' '.join(there))}; name another folder, or ask for one of "
            f"these as well"
        )
    for key in BUDGET:
        if key in held.budget and held.budget[key] != budget[key]:
            raise _another(
                f"--out {folder} holds a comparison with another budget", (key, held.budget[key], budget[key])
            )


def _unchanged(value: Any) -> Any:
    return value


IN_TODAYS_FIELDS: dict[str, Callable[[Any], Any]] = {"config": ModelConfig.current, "recipe": Recipe.current}
"""Part of a request -> what makes today's tree of one that an older version wrote."""


def check_runs(folder: Path, requests: Collection[dict[str, Any]], text: dict[str, Any]) -> None:
    """Raises RequestError where the folder holds a comparison on other text than `text` describes, or runs of the asked
    models, whatever their seed, that were trained otherwise than the requests say."""
    held = read_results(folder)
    for key, what in TEXT.items():
        if held is not None and held.data.get(key, text[key]) != text[key]:
            on = shown(held.data.get("name"))
            raise RequestError(f"--out {folder} holds a comparison with another {what}, on {on}; name another folder")
    asked = {request["name"]: request for request in requests}
    places = {place_of(folder, request["name"], request["recipe"]["seed"]): request["name"] for request in requests}
    runs = [] if held is None else [run.model_dump() for run in held.runs]
    for run in [*runs, *_begun(folder, places)]:
        request = asked.get(str(run.get("name")), {})
        for key in ("config", "recipe", "tokens"):
            known = key in request and run.get(key)
            was = IN_TODAYS_FIELDS.get(key, _unchanged)(run[key]) if known else None
            change = first_difference(was, request[key], besides=("seed",)) if known else None
            if change is not None:
                raise _another(f"--out {folder} holds a run of {run['name']} with another {key}", change)
    wanted = {(request["name"], request["recipe"]["seed"]) for request in requests}
    for entry in [] if held is None else held.runs:
        if entry.status != "failed" and (entry.name, entry.seed) not in wanted:
            raise RequestError(
                f"--out {folder} also holds {shown(entry.name)}, seed {entry.seed}, which would be missing from the "
                f"report; ask for it as well, or name another folder"
            )


def compiled_before(folder: Path) -> bool | None:
    """Whether the runs that lie there were compiled; None where there are none, or it is not said."""
    found = (request.get("recipe") for request in _begun(folder, {}))
    return next((recipe["compile"] for recipe in found if isinstance(recipe, dict) and "compile" in recipe), None)


def _begun(folder: Path, places: dict[Path, str]) -> Iterator[dict[str, Any]]:
    """The requests of the runs that lie there. Raises RequestError where one is in a place that is needed, and cannot
    be read or is of another model."""
    for path in sorted(folder.glob("runs/*/request.json")):
        try:
            request = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            request = None
        name = request.get("name") if isinstance(request, dict) else None
        if (needed := places.get(path.parent, name)) != name:
            raise RequestError(f"--out {folder}: {path} is not of a run of {needed}; name another folder")
        if isinstance(request, dict):
            yield request


def _another(what: str, change: tuple[str, Any, Any]) -> RequestError:
    path, was, now = (shown(word) for word in change)
    return RequestError(f"{what}: {path} was {was} and is now {now}; name another folder")
