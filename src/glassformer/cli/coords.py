"""`inspect --coord-check`: whether a model's activations move as far when it is wide as when it is narrow."""

from __future__ import annotations

import json
from pathlib import Path

from glassformer import machine
from glassformer.cli.show import output, ruled
from glassformer.dynamics.coord_check import LEVEL, coordinate_check
from glassformer.files import disk_errors
from glassformer.naming import preset

FOLDER, PICTURE = "inspection", "coord-check.png"


def show_coord_check(name: str, out: str | None, as_json: bool) -> None:
    """Prints the slope of every kind of site and writes OUT/coord-check.png; with `as_json` the figure is drawn where
    `out` is given. Raises RequestError."""
    machine.apply(machine.settings("cpu"))
    check = coordinate_check(preset(name))
    folder = out if out is not None or as_json else FOLDER
    picture = None if folder is None else Path(folder) / PICTURE
    if picture is not None:
        with disk_errors(picture):
            picture.parent.mkdir(parents=True, exist_ok=True)
            check.save(picture)
    if as_json:
        print(json.dumps({**check.to_dict(), "figure": None if picture is None else str(picture)}))
        return
    console = output()
    table = ruled()
    table.add_column("site")
    for heading in ("slope", *(f"width {width}" for width in check.widths)):
        table.add_column(heading, justify="right")
    for kind, slope in check.slopes.items():
        mark = "[red]" if kind in check.growing else ""
        table.add_row(kind, f"{mark}{slope:+.2f}", *(f"{value:.3g}" for value in check.changes[kind][-1]))
    console.print(
        f"mean |x - x0| after {check.steps} steps of Adam at {check.learning_rate:g}, by width", highlight=False
    )
    console.print(table)
    verdict = f"{', '.join(check.growing)} grow with the width: the best learning rate will fall with it; try +mup"
    console.print(verdict if check.growing else f"nothing grows with the width (every slope is at most {LEVEL:g})")
    if picture is not None:
        print(f"figure: {picture}")
