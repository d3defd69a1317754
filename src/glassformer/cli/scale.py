"""Scaling laws in the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from glassformer.cli.show import ComparisonView, clock, output, ruled, short
from glassformer.errors import RequestError
from glassformer.laboratory.law import fit_scaling_law
from glassformer.laboratory.points import points
from glassformer.laboratory.summary import summary
from glassformer.report.scaling import finding, interval_words, several_finding, write_scaling
from glassformer.runs import events
from glassformer.units import quantity

if TYPE_CHECKING:
    from glassformer.laboratory.scaling import ScalingPlan


def pairs(given: list[str] | None, field: str) -> dict[str, str]:
    """NAME=TEXT, each once."""
    found: dict[str, str] = {}
    for one in given or []:
        name, equals, text = one.partition("=")
        if not (name and equals and text) or name in found:
            raise RequestError(code="type", field=field, value=one, expected="NAME=TEXT, each name once")
        found[name] = text
    return found


def pair(text: str) -> tuple[float, float]:
    """7b,140b -> parameters and tokens."""
    sizes = text.split(",")
    if len(sizes) != 2:
        raise RequestError(code="type", field="predict", value=text, expected="PARAMETERS,TOKENS such as 7b,140b")
    return quantity(sizes[0], field="predict"), quantity(sizes[1], field="predict")


def show_law(
    data: str,
    form: str,
    columns: list[str] | None,
    where: list[str] | None,
    without_worst: int,
    predict: list[str] | None,
    flops: list[float] | None,
    far: bool,
    out: str | None,
    command: str,
    as_json: bool,
) -> None:
    """Fits a law to a table of runs, and says what it says."""
    read = points(data, pairs(columns, "columns"), pairs(where, "where"))
    if not 0 <= without_worst < len(read):
        raise RequestError(code="range", field="without_worst", value=without_worst, expected=f"0 to {len(read) - 1}")
    asked = [pair(one) for one in predict or []]
    law = fit_scaling_law(read.without_worst(without_worst), form)
    found = summary(law, form, asked, flops, far)
    if out is not None:
        write_scaling(found, command, out)
    if as_json:
        print(json.dumps(found, allow_nan=False))
        return
    console = output()
    console.print(found["formula"], style="bold", highlight=False)
    console.print(finding(found), highlight=False)
    for table in tables(found):
        console.print(table)
    if out is not None:
        console.print(f"page: {out}", style="dim", highlight=False)


class GridView(ComparisonView):
    """The plan before anything is trained, then a bar for all runs, and one for each of those at work."""

    def __init__(self, quiet: bool = False):
        super().__init__(quiet)
        self.heard: set[str] = set()
        self.ended = 0
        self.total = 0

    def plan(self, plan: ScalingPlan) -> None:
        for stage in self.reading.values():
            self.bars.update(stage, visible=False)
        if not self.console.quiet:
            self.console.print(plan_table(plan))
        for note in plan.notes:
            self._once(f"note: {note}")
        left = sum(run.seconds > 0 for run in plan.runs)
        self.say(
            f"{left} of {len(plan.runs)} runs are to be trained, about {clock(plan.seconds)} ({plan.source}). Training "
            "starts now; Ctrl-C stops it, and the same command goes on"
        )
        self.total = len(plan.runs)
        self.whole = self.bars.add_task("all runs", total=self.total, note="")

    def event(self, event: events.Event) -> None:
        if isinstance(event, events.Begin):
            for task in self.tasks.values():
                self.bars.remove_task(task)
            self.tasks.clear()
            self._once(event.how)
            for name, seed in event.runs:
                self.tasks[name, seed] = self.bars.add_task(f"{name} seed {seed}", total=1.0, note="waiting")
            return
        super().event(event)
        if isinstance(event, events.Kept | events.End):
            self.ended += 1
            self.bars.update(self.whole, completed=self.ended, note=f"{self.ended} of {self.total}")

    def _once(self, text: str) -> None:
        if text not in self.heard:
            self.heard.add(text)
            self.say(text)


def plan_table(plan: ScalingPlan) -> Table:
    """A row for each model, size and budget."""
    table = ruled()
    for heading in ("model", "parameters", "tokens", "FLOPs", "6 N D", "lr", "runs", "time"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    rows: dict[tuple[str, str], list[Any]] = {}
    for run in plan.runs:
        rows.setdefault((run.model, run.cell), []).append(run)
    for runs in rows.values():
        one, left = runs[0], sum(run.seconds for run in runs)
        table.add_row(
            f"{one.model}@{one.size}", short(one.params), short(one.tokens), f"{one.flops:.3g}",
            f"{one.approximate:.3g}", f"{one.learning_rate:.2g}", str(len(runs)), clock(left) if left else "done",
        )  # fmt: skip
    table.caption = "parameters of the layers, without embeddings; FLOPs of training are exact"
    return table


def train_laws(
    models: list[str],
    data: str,
    sizes: str,
    budgets: str | None,
    isoflop: str | None,
    predict: list[str] | None,
    out: str,
    as_json: bool,
    **how: Any,
) -> None:
    """Trains the models on a grid, and says how their losses scale."""
    from glassformer.laboratory.scaling import REPORT, refuse_failed, scale

    asked = [pair(one) for one in predict or []]
    with GridView(quiet=as_json) as view:
        found = scale(
            models, data, sizes, budgets, isoflop, predict=asked, out=out, on_plan=view.plan, on_event=view.event,
            on_progress=view.progress, **how,
        )  # fmt: skip
    if as_json:
        print(json.dumps(found, allow_nan=False))
    else:
        console = output()
        console.print(several_finding(found), highlight=False)
        for law in found["laws"]:
            if "figures" in law:
                console.print(f"{law['model']}: {law['formula']}", style="bold", highlight=False, markup=False)
                console.print(finding(law), highlight=False)
                for table in tables(law):
                    console.print(table)
        for pair_of in found["differences"]:
            console.print(differences(pair_of))
        console.print(f"report: {Path(out) / REPORT}", highlight=False)
    refuse_failed(found)


def differences(found: dict[str, Any]) -> Table:
    """What differs between two models."""
    table = ruled(f"{found['b']} minus {found['a']}")
    for heading in ("", "difference", "interval"):
        table.add_column(heading, justify="right" if heading else "left")
    for one in found["figures"]:
        table.add_row(one["name"], f"{one['difference']:+.3f}", f"{one['low']:+.3f} to {one['high']:+.3f}")
    for one in found["losses"]:
        told = f"{one['low']:+.4f} to {one['high']:+.4f}"
        table.add_row(f"best loss of {one['flops']:.3g} FLOPs", f"{one['difference']:+.4f}", told)
    return table


def tables(found: dict[str, Any]) -> list[Table]:
    figures = ruled()
    for heading in ("figure", "fitted", f"interval of {found['level']:.0%}"):
        figures.add_column(heading, justify="left" if heading == "figure" else "right")
    for one in found["figures"]:
        figures.add_row(one["name"], f"{one['value']:.6g}", interval_words(one))
    made = [figures]
    if found["predicted"] or found["optimal"]:
        predicted = ruled()
        for heading in ("parameters", "tokens", "a parameter", "FLOPs", "loss", "interval"):
            predicted.add_column(heading, justify="right")
        for one in found["predicted"]:
            n, d = one["params"], one["tokens"]
            told = f"{one['low']:.4f} to {one['high']:.4f}"
            predicted.add_row(f"{n:.3g}", f"{d:.3g}", f"{d / n:.1f}", f"{6 * n * d:.3g}", f"{one['loss']:.4f}", told)
        for one in found["optimal"]:
            n, d, ratio, flops = (one[name] for name in ("params", "tokens", "ratio", "flops"))
            told = f"{one['low']:.4f} to {one['high']:.4f}, the best"
            predicted.add_row(f"{n:.3g}", f"{d:.3g}", f"{ratio:.1f}", f"{flops:.3g}", f"{one['loss']:.4f}", told)
        made.append(predicted)
    return made
