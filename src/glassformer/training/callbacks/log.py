from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import IO, Any

from glassformer.files import disk_errors, replace_text
from glassformer.training.callbacks.base import Callback
from glassformer.training.progress import read_metrics
from glassformer.training.state import Training


class Log(Callback):
    """Callback that writes the rows of a run to metrics.jsonl, line by line."""

    def __init__(self) -> None:
        self.file: IO[str] | None = None

    def started(self, run: Training) -> None:
        self._open(run)
        lost = run.step - len({row["step"] for row in run.rows if "validation" not in row})
        if run.folder is not None and lost > 0 and run.groups.leads:  # because every step leaves one row
            warnings.warn(
                f"{run.folder / 'metrics.jsonl'} lacks {lost:,} of the {run.step:,} steps so far: the run continues as "
                f"it would have, but its curves have a gap"
            )

    def recorded(self, run: Training, row: dict[str, Any]) -> None:
        if self.file:
            run.check_folder()
            with disk_errors(Path(self.file.name)):
                self.file.write(json.dumps(row) + "\n")

    def rolled_back(self, run: Training, step: int) -> None:
        self._open(run)

    def ended(self, run: Training) -> None:
        if self.file:
            with disk_errors(Path(self.file.name)):
                self.file.close()

    def _open(self, run: Training) -> None:
        """Opens metrics.jsonl, and removes from it and from `run.rows` the rows after the present step of the run."""
        if run.folder is None:
            return
        if self.file:
            self.file.close()
        path = run.folder / "metrics.jsonl"
        run.rows = [row for row in read_metrics(path) if row["step"] <= run.step] if run.step else []
        measured = [row["validation"] for row in run.rows if "validation" in row]
        run.validation = measured[-1] if measured else run.validation
        if not run.groups.leads:
            return
        with disk_errors(path):
            replace_text(path, "".join(json.dumps(row) + "\n" for row in run.rows))
            self.file = path.open("a", encoding="utf-8", buffering=1)
