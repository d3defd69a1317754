"""What `--executor`, `--slots` and `--workers` name."""

from __future__ import annotations

import re

from glassformer.errors import RequestError
from glassformer.runs import executor as executors
from glassformer.runs.executor import Executor


def executor_of(executor: str = "here", slots: str | None = None, workers: int = 1, device: str = "auto") -> Executor:
    """The executor that these words name.

    executor  here; slurm, or slurm:OPTION=VALUE,OPTION=VALUE with options of sbatch
    slots     devices of this machine: cuda:0,cuda:1
    workers   runs side by side on this machine
    device    what the runs ask for

    Raises RequestError."""
    kind, _, rest = executor.partition(":")
    if kind not in ("here", "slurm") or (kind == "here" and rest):
        raise RequestError(code="type", field="executor", value=executor, expected="here or slurm:OPTION=VALUE,...")
    given = {"executor": kind != "here", "slots": slots is not None, "workers": workers != 1}
    if len(both := [f"--{name}" for name, there in given.items() if there]) > 1:
        message = f"{' and '.join(both)} each say where runs are trained; give one of them"
        raise RequestError(message, code="conflict", field=both[1][2:], value=slots or workers, expected="left out")
    if slots is not None:
        from glassformer.runs.slots import Slots

        return Slots([one.strip() for one in slots.split(",") if one.strip()], device)
    if kind == "here":
        return executors.Local(workers)
    from glassformer.runs.slurm import Slurm

    return Slurm(_options(rest))


def _options(text: str) -> dict[str, str]:
    """NAME=VALUE,NAME=VALUE; a value may have commas, and a flag is NAME= without one."""
    found: dict[str, str] = {}
    for one in re.split(r",(?=[a-z-]+=)", text) if text else []:
        name, equals, value = one.partition("=")
        if not re.fullmatch(r"[a-z]+(-[a-z]+)*", name) or not equals or name in found or "\n" in value:
            raise RequestError(
                code="type", field="executor", value=one, expected="options of sbatch as partition=NAME,time=MINUTES"
            )
        found[name] = value
    return found
