"""Start of several processes for `train`, and refusal of several for all other commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from glassformer.comparison.single import SingleRun
from glassformer.errors import RequestError
from glassformer.parallel.launch import joined, spawn
from glassformer.runs.live import ComparisonView
from glassformer.training.request import check_run
from glassformer.training.shared import layout_of


def begin_processes(processes: str | None, asked: SingleRun, quiet: bool) -> bool:
    """Trains a run in `processes` new processes, after a check, and returns True. Returns False if this process must
    train it: without --processes, for a single process, or in one of the new processes.

    Raises RequestError for a run that cannot be trained so, and under torchrun or srun."""
    place = joined()
    if processes is None or (place is not None and "GLASSFORMER_LAUNCHED" in os.environ):
        return False
    if place is not None:
        raise RequestError(
            f"--processes {processes} starts processes, and torchrun or srun has started {place.world}; leave it out",
            code="conflict", field="processes", value=processes, expected="None",
        )  # fmt: skip
    world = count_of(processes, asked.recipe.device)
    shape = layout_of(asked.layout, world)
    if world == 1:
        return False
    with ComparisonView(quiet=quiet) as view:
        check_run(*asked.arguments, view.progress, asked.pretrained, shape)
    begun = asked.out is not None and (Path(asked.out) / "recipe.yaml").is_file() and asked.resume
    spawn(sys.argv[1:], world, () if begun else ("--resume",))
    return True


def count_of(processes: str, device: str) -> int:
    """Returns the number of processes in the option --processes; for auto, the number of GPUs, or 1 without a GPU.

    Raises RequestError unless it is auto or a number from 1 to 1024."""
    if processes == "auto":
        import torch

        return torch.cuda.device_count() if device in ("auto", "cuda") and torch.cuda.is_available() else 1
    if not (processes.isascii() and processes.isdecimal() and 1 <= int(processes) <= 1024):
        raise RequestError(
            code="range", field="processes", value=processes, expected="auto, or a number from 1 to 1024"
        )
    return int(processes)


def refuse_ranks(words: Sequence[str]) -> None:
    """Refuses a command other than `train` in several processes of torchrun or srun, because each would do all of the
    work and write the same files. Raises RequestError in the first process, SystemExit in the others."""
    place = joined()
    if place is None or place.world == 1 or words[0] == "train":
        return
    if place.rank:
        raise SystemExit(2)
    raise RequestError(
        f"{words[0]} is work for one process, and torchrun or srun has started {place.world}; start it without them",
        code="conflict", field="command", value=words[0], expected="train",
    )  # fmt: skip
