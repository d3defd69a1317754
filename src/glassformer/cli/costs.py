"""What models cost, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

from glassformer.cli.show import output, size
from glassformer.errors import RequestError
from glassformer.naming import preset
from glassformer.planning import Plan, plan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}

ROWS: dict[str, Callable[[Plan], str]] = {
    "parameters": lambda one: f"{one.parameters:,}",
    "of them for a token": lambda one: f"{one.active_parameters:,}",
    "weights": lambda one: size(one.weight_bytes),
    "context": lambda one: f"{one.context:,}",
    "state of a sequence": lambda one: size(one.state_bytes),
    "state per token": lambda one: f"{one.state_bytes_per_token:,.0f} B",
    "one token more adds": lambda one: f"{one.next_token_bytes:,} B",
    "weights and states": lambda one: size(one.bytes),
    "read by a step": lambda one: size(one.bytes_read),
    "FLOPs per token": lambda one: f"{one.flops:.3g}",
}


def show_plans(
    names: list[str], context: int | None, batch: int, dtype: str, state_dtype: str | None, as_json: bool
) -> None:
    if not names:
        raise RequestError("plan needs at least one model, such as llama-7b")
    kept = None if state_dtype is None else DTYPES[state_dtype]
    plans = {
        name: plan(preset(name), context=context, batch=batch, dtype=DTYPES[dtype], state_dtype=kept) for name in names
    }
    if as_json:
        print(json.dumps([{"name": name, **_facts(one)} for name, one in plans.items()]))
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    for name in plans:
        table.add_column(name, justify="right", overflow="fold", max_width=24)
    for what, told in ROWS.items():
        table.add_row(what, *map(told, plans.values()))
    output().print(table)
    rows = "one sequence" if batch == 1 else f"{batch} sequences"
    kept_in = f"weights in {dtype}, state in {state_dtype or dtype}, {rows} of that context"
    output().print(kept_in, style="dim", highlight=False)


def _facts(one: Plan) -> dict[str, Any]:
    kinds = {"dtype": one.dtype, "state_dtype": one.state_dtype}
    derived = ("state_bytes_per_token", "bytes", "bytes_read")
    return {
        **vars(one),
        **{name: str(kind).removeprefix("torch.") for name, kind in kinds.items()},
        **{name: getattr(one, name) for name in derived},
    }
