"""Scaling laws as values: the plan of a grid, the law of a table of runs, the laws of trained models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from glassformer.figures.plain import plain
from glassformer.figures.terminal import Printed, Reported, Tabular, TextTable, clock, ruled, short, unbroken
from glassformer.laboratory.pages.scaling import (
    finding,
    interval_words,
    render_scaling,
    render_several,
    several_finding,
)
from glassformer.laboratory.several import LawDifference, LawsRecord
from glassformer.laboratory.summary import BestUse, LawRecord, Prediction

REPORT = "report.html"


@dataclass(frozen=True)
class Planned:
    """Planned training run of a grid: its sizes, training FLOPs and estimated time."""

    model: str
    size: str
    cell: str
    params: int
    """Parameters of the layers, without the embedding."""
    tokens: int
    """Training tokens, rounded to whole steps."""
    flops: float
    """Training FLOPs, exact: with attention and the vocabulary's matmuls."""
    approximate: float
    """Approximate FLOPs 6 N D, the variable of laws."""
    learning_rate: float
    seed: int
    seconds: float
    """Estimated seconds; 0 for a finished run."""


@dataclass(frozen=True)
class ScalingPlan(Printed):
    """The runs of a grid before the first is trained; `print` shows a row for each model, size and budget."""

    runs: list[Planned]
    source: str
    """Origin of the estimated times."""
    notes: list[str]

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.runs)

    @property
    def left(self) -> int:
        """Number of runs that are not trained yet."""
        return sum(run.seconds > 0 for run in self.runs)

    def lines(self) -> Iterator[Any]:
        """Yields a table of the runs, the notes, and the estimated time."""
        table = ruled()
        for heading in ("model", "parameters", "tokens", "FLOPs", "6 N D", "lr", "runs", "time"):
            table.add_column(heading, justify="left" if heading == "model" else "right")
        rows: dict[tuple[str, str], list[Planned]] = {}
        for run in self.runs:
            rows.setdefault((run.model, run.cell), []).append(run)
        for runs in rows.values():
            one, left = runs[0], sum(run.seconds for run in runs)
            table.add_row(
                f"{one.model}@{one.size}", short(one.params), short(one.tokens), f"{one.flops:.3g}",
                f"{one.approximate:.3g}", f"{one.learning_rate:.2g}", str(len(runs)), clock(left) if left else "done",
            )  # fmt: skip
        table.caption = "parameters of the layers, without embeddings; FLOPs of training are exact"
        yield table
        yield from (f"note: {note}" for note in self.notes)
        yield (
            f"{self.left} of {len(self.runs)} runs are to be trained, about {clock(self.seconds)} ({self.source}). "
            "Training starts now; Ctrl-C stops it, and the same command continues"
        )


@dataclass(frozen=True, kw_only=True)
class ScalingLaw(LawRecord, Reported, Tabular):
    """A law that was fitted to a table of runs; `print` shows its parameters and predictions.

    Attributes
    ----------
    command : str
        Command that repeats the fit. The other attributes are those of `LawRecord`.

    Examples
    --------
    >>> law = gf.scale(None, "runs.csv")  # doctest: +SKIP
    >>> law.values["alpha"]  # doctest: +SKIP
    """

    command: str = ""

    def lines(self) -> Iterator[Any]:
        """Yields the printed text: the law's formula, the result of the fit, and tables."""
        yield Text(self.formula, style="bold")
        yield finding(self)
        yield from law_tables(self)

    def html(self) -> str:
        return render_scaling(self, self.command)

    def to_dict(self) -> dict[str, Any]:
        """Returns the law as plain values, without the command."""
        told = super().to_dict()
        del told["command"]
        return told

    def records(self) -> list[dict[str, Any]]:
        """Returns a table row for each parameter of the law."""
        return plain(self.figures)


@dataclass(frozen=True, kw_only=True)
class Scaling(LawsRecord, Reported, Tabular):
    """Scaling laws of models that were trained on a grid; `print` shows their parameters and differences.

    Attributes
    ----------
    folder : Path or None
        Folder of scaling.json, report.html and the comparisons; None if nothing was written. The other attributes are
        those of `LawsRecord`.

    Examples
    --------
    >>> found = gf.scale(["gpt2"], "tiny.txt", sizes="0.1m..1m", budgets="50k,100k")  # doctest: +SKIP
    >>> found.fitted[0].values["alpha"]  # doctest: +SKIP
    """

    folder: Path | None = None

    def lines(self) -> Iterator[Any]:
        """Yields the results of the laws, their tables, differences, and the place of the report."""
        yield several_finding(self)
        for law in self.fitted:
            yield Text(f"{law.model}: {law.formula}", style="bold")
            yield finding(law)
            yield from law_tables(law)
        yield from map(difference_table, self.differences)
        if self.folder is not None:
            yield unbroken(f"report: {self.folder / REPORT}")

    def html(self) -> str:
        return render_several(self)

    def records(self) -> list[dict[str, Any]]:
        """Returns a table row for each run."""
        return plain(self.runs)


def law_tables(law: LawRecord) -> Iterator[TextTable]:
    """Yields tables of a law's parameters, and of its predictions if it has any."""
    figures = ruled()
    for heading in ("figure", "fitted", f"interval of {law.level:.0%}"):
        figures.add_column(heading, justify="left" if heading == "figure" else "right")
    for figure in law.figures:
        figures.add_row(figure.name, f"{figure.value:.6g}", interval_words(figure))
    yield figures
    if not (law.predicted or law.optimal):
        return
    predicted = ruled()
    for heading in ("parameters", "tokens", "a parameter", "FLOPs", "loss", "interval"):
        predicted.add_column(heading, justify="right")
    rows: list[tuple[Prediction | BestUse, float, str]] = [
        *((one, 6 * one.params * one.tokens, "") for one in law.predicted),
        *((best, best.flops, ", the best") for best in law.optimal),
    ]
    for one, flops, best_ in rows:
        n, d = one.params, one.tokens
        told = f"{one.low:.4f} to {one.high:.4f}{best_}"
        predicted.add_row(f"{n:.3g}", f"{d:.3g}", f"{d / n:.1f}", f"{flops:.3g}", f"{one.loss:.4f}", told)
    yield predicted


def difference_table(found: LawDifference) -> TextTable:
    """Returns the table of differences between the scaling laws of two models."""
    table = ruled(f"{found.b} minus {found.a}")
    for heading in ("", "difference", "interval"):
        table.add_column(heading, justify="right" if heading else "left")
    for one in found.figures:
        table.add_row(one.name, f"{one.difference:+.3f}", f"{one.low:+.3f} to {one.high:+.3f}")
    for gap in found.losses:
        told = f"{gap.low:+.4f} to {gap.high:+.4f}"
        table.add_row(f"best loss of {gap.flops:.3g} FLOPs", f"{gap.difference:+.4f}", told)
    return table
