"""Scaling laws in the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from glassformer.cli.show import output, ruled
from glassformer.errors import RequestError
from glassformer.laboratory.law import fit_scaling_law
from glassformer.laboratory.points import points
from glassformer.laboratory.summary import summary
from glassformer.report.scaling import finding, write_scaling
from glassformer.training.checkpoint import disk_errors
from glassformer.units import quantity


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
        with disk_errors(Path(out)):
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


def tables(found: dict[str, Any]) -> list[Table]:
    figures = ruled()
    for heading in ("figure", "fitted", f"interval of {found['level']:.0%}"):
        figures.add_column(heading, justify="left" if heading == "figure" else "right")
    for one in found["figures"]:
        figures.add_row(one["name"], f"{one['value']:.6g}", f"{one['low']:.4g} to {one['high']:.4g}")
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
            predicted.add_row(f"{n:.3g}", f"{d:.3g}", f"{ratio:.1f}", f"{flops:.3g}", f"{one['loss']:.4f}", "the best")
        made.append(predicted)
    return made
