"""Copies of a run's measurements for TensorBoard, Weights & Biases and trackio.

The run folder holds all measurements anyway, and needs no account. A sink is chosen by its name, and its package
imported when it is opened; a sink does not change the run, so the recipe does not name it.
"""

from __future__ import annotations

import hashlib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from glassformer.errors import RequestError
from glassformer.training.callbacks import Report

PROJECT = "glassformer"

Numbers = Mapping[str, float]


class Sink(Protocol):
    """Interface of a sink, a service that receives a copy of a run's measurements by name at each step."""

    def write(self, step: int, numbers: Numbers) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Sink that writes event files to RUN/tensorboard; `tensorboard --logdir RUN` shows them."""

    package = "tensorboard"

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], step: int):
        # purge_step deletes the events that a run wrote after the checkpoint that it resumes
        purge = {"purge_step": step + 1} if step else {}
        self.writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"), **purge)

    def write(self, step: int, numbers: Numbers) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Sink that sends measurements to Weights & Biases, project `glassformer`; files in RUN/wandb. WANDB_MODE=offline
    needs no account."""

    package = "wandb"

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], step: int):
        self.run = import_module("wandb").init(
            project=PROJECT, name=name, dir=str(folder), config=dict(config), id=_identity(folder), resume="allow"
        )

    def write(self, step: int, numbers: Numbers) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """Sink that writes measurements to trackio's folder on this machine, project `glassformer`; `trackio show` draws
    them."""

    package = "trackio"

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], step: int):
        name = f"{name}-{_identity(folder)[:6]}"  # trackio would append to a run with an equal name
        self.run = import_module("trackio").init(project=PROJECT, name=name, config=dict(config), resume="allow")

    def write(self, step: int, numbers: Numbers) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self) -> None:
        self.run.finish()


SINKS: dict[str, type[TensorBoard] | type[WandB] | type[Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


def check_sinks(names: Iterable[str]) -> None:
    """Raises RequestError for an unknown sink, one given twice, or one whose package is not installed."""
    seen: list[str] = []
    for name in names:
        if name not in SINKS:
            raise RequestError(
                f"log_to={name} is not a sink; use {', '.join(list(SINKS)[:-1])} or {list(SINKS)[-1]}",
                code="unknown", field="log_to", value=name,
            )  # fmt: skip
        if name in seen:
            raise RequestError(f"log_to={name} is given twice", code="conflict", field="log_to", value=name)
        if find_spec(SINKS[name].package) is None:
            package = SINKS[name].package
            raise RequestError(
                f"log_to={name} needs the package {package}: pip install {package}",
                code="missing", field="log_to", value=name,
            )  # fmt: skip
        seen.append(name)


class Logger:
    """Sends the reports of a run to sinks: `with open_sinks(...) as logger: train(..., callbacks=[Reporter(logger)])`.

    A sink that fails is dropped with one warning, because the run matters more than a copy of its measurements."""

    def __init__(self, sinks: Mapping[str, Sink]):
        self.sinks = dict(sinks)

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with redirect_stdout(sys.stderr):  # the packages print on closing; standard output is for the result
            for name, sink in list(self.sinks.items()):
                self._try(name, sink.close)

    def __call__(self, report: Report) -> None:
        """Writes the measurements of a report to the sinks: those of its step, validation or events."""
        if report.validation:
            found = {name: value for name, value in report.validation.items() if value is not None}
            self.write(report.step, {f"validation/{name}": value for name, value in found.items()})
        elif report.events:
            for event in report.events:
                self.record(event)
        else:
            names = ("loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second")
            self.write(report.step, {name: getattr(report, name) for name in names} | flat(report.statistics or {}))

    def record(self, row: Mapping[str, Any]) -> None:
        """Writes a row of dynamics.jsonl to the sinks: statistics as STATISTIC/WHERE, for several heads the minimum,
        mean and maximum; an event as event/NAME, with its size in sigmas, or 1 if it has no size."""
        if "event" in row:
            sigmas = row.get("sigmas")
            measured = isinstance(sigmas, float) and math.isfinite(sigmas)
            self.write(row["step"], {f"event/{row['event']}": sigmas if measured else 1.0})
        self.write(row["step"], flat(row.get("statistics", {})))

    def write(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Writes the finite values among `numbers` to every sink."""
        kept = {name: float(v) for name, v in numbers.items() if isinstance(v, int | float) and math.isfinite(v)}
        for name, sink in list(self.sinks.items()) if kept else ():
            self._try(name, lambda sink=sink: sink.write(step, kept))  # type: ignore[misc]

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            del self.sinks[name]
            warnings.warn(f"{name} failed and gets no more of this run: {_one_line(error)}")


def open_sinks(names: Iterable[str], folder: Path, name: str, config: Mapping[str, Any], step: int = 0) -> Logger:
    """Opens the sinks for the run in `folder`, which continues after `step`. Raises RequestError if one fails to
    open."""
    names = list(names)
    check_sinks(names)
    opened: dict[str, Sink] = {}
    for one in names:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with redirect_stdout(sys.stderr):
                opened[one] = SINKS[one](folder, name, config, step)
        except Exception as error:
            Logger(opened).__exit__(None, None, None)
            raise RequestError(
                f"log_to={one} could not be opened: {_one_line(error)}", code="missing", field="log_to", value=one
            ) from None
    return Logger(opened)


def flat(statistics: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Flattens nested statistics: returns {STATISTIC/WHERE: number} from {STATISTIC: {WHERE: number or [number, ...]}};
    lists as /min, /mean, /max."""
    made: dict[str, float] = {}
    for statistic, places in statistics.items():
        for where, value in places.items():
            values = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int | float)]
            if isinstance(value, list) and values:
                ends = {"min": min(values), "mean": math.fsum(v / len(values) for v in values), "max": max(values)}
                made |= {f"{statistic}/{where}/{which}": v for which, v in ends.items()}
            elif values:
                made[f"{statistic}/{where}"] = values[0]
    return made


def _identity(folder: Path) -> str:
    """Returns an identifier of the run folder, equal before and after resuming."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
