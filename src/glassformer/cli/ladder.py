"""Ladders in the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from glassformer.cli.show import ComparisonView, decimals, output, ruled, size
from glassformer.laboratory.ladder import PAGE, ablate
from glassformer.report.ladder import findings


def show_ladder(base: str, data: str, fields: dict[str, Any], command: str, as_json: bool) -> None:
    """Trains the arms of a ladder, and says what each change does."""
    with ComparisonView(quiet=as_json) as view:
        found = ablate(base, data, on_event=view.event, on_progress=view.progress, command=command, **fields)
    if as_json:
        print(json.dumps(found, allow_nan=False))
        return
    console = output()
    console.print(arms_table(found))
    for line in findings(found):
        console.print(line, markup=False, highlight=False)
    print(f"page: {Path(fields['out']) / PAGE}")


def arms_table(found: dict[str, Any]) -> Table:
    """Every arm with loss and costs."""
    table = ruled(f"{found['base']} to {found['target']}")
    table.add_column("changes", overflow="fold", min_width=12)
    for heading in ("loss", "params", "tokens/s", "memory", "state/tok"):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm in found["arms"]:
        speed, held = arm["train.tokens_per_second"], arm["parameters"]
        table.add_row(
            arm["label"], arm["trouble"] or decimals(arm["loss"]), "-" if held is None else f"{held:,.0f}",
            "-" if speed is None else f"{speed:,.0f}", size(arm["train.peak_memory_bytes"]),
            size(arm["generation.state_bytes_per_token"]),
        )  # fmt: skip
    return table
