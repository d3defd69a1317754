from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from glassformer import machine
from glassformer.errors import RequestError, WorkError
from glassformer.runs.results import MachineRecord


def measured_before(path: Path) -> dict[str, Any]:
    """Returns the contents of the JSON file of an earlier run; {} if `path` does not exist. Raises RequestError if
    another machine measured it: a table holds the rows of one machine."""
    if not path.is_file():
        return {}
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    was, here = MachineRecord(before["machine"]), MachineRecord(machine.machine())
    if not was.like(here):
        raise RequestError(
            f"--only: {path} holds rows of another machine ({was.root.get('processor')}, torch "
            f"{was.root.get('torch')}); name another --out, or measure all of them",
            code="conflict", field="out", value=str(path), expected="another file",
        )  # fmt: skip
    return before


def among(names: Iterable[str], only: str | None) -> list[str]:
    """Returns the names that start with one of the prefixes in `only`, which commas (or semicolons) separate; all names
    without `only`. Raises RequestError for a prefix without a name."""
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


def printed(program: str, first: str, world: int, *rest: object) -> str:
    """Runs `program` in `world` processes, each with the arguments (first, rank, world, *rest); returns the output of
    rank 0. Raises WorkError if a rank fails."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, first, str(rank), str(world), *map(str, rest)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    told = [process.communicate()[0] for process in ranks]
    if failed := [rank for rank, process in enumerate(ranks) if process.returncode]:
        raise WorkError(f"rank {failed[0]} of {world} failed", code="process")
    return told[0]
