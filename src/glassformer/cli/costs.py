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
from glassformer.planning.machines import Cluster

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
    names: list[str],
    context: int | None,
    batch: int,
    dtype: str,
    state_dtype: str | None,
    as_json: bool,
    explain: bool = False,
    on: Cluster | None = None,
) -> None:
    if not names:
        raise RequestError("plan needs at least one model, such as llama-7b")
    kept = None if state_dtype is None else DTYPES[state_dtype]
    plans = {
        name: plan(preset(name), context=context, batch=batch, dtype=DTYPES[dtype], state_dtype=kept) for name in names
    }
    if as_json:
        fits = {name: _fits(one, on) if on else {} for name, one in plans.items()}
        print(json.dumps([{"name": name, **one.to_dict(), **fits[name]} for name, one in plans.items()]))
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    for name in plans:
        table.add_column(name, justify="right", overflow="fold", max_width=24)
    for what, told in ROWS.items():
        table.add_row(what, *map(told, plans.values()))
    if on is not None:
        fitting = [_fits(one, on) for one in plans.values()]
        table.add_row(f"sequences that fit a {on.name}", *(f"{fit['batch_that_fits']:,}" for fit in fitting))
        table.add_row("context that fits", *(f"{fit['context_that_fits']:,}" for fit in fitting))
    output().print(table)
    rows = "one sequence" if batch == 1 else f"{batch} sequences"
    kept_in = f"weights in {dtype}, state in {state_dtype or dtype}, {rows} of that context"
    output().print(kept_in, style="dim", highlight=False)
    if explain:
        for name, one in plans.items():
            show_explained(name, one)


def _fits(one: Plan, on: Cluster) -> dict[str, int]:
    """Of one accelerator."""
    memory = on.machine.memory
    return {"batch_that_fits": one.batch_that_fits(memory), "context_that_fits": one.context_that_fits(memory)}


def show_explained(name: str, one: Plan) -> None:
    """Every figure of a model with the formula that it was made by."""
    parts = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), title=name, title_justify="left")
    for head in ("component", "parameters", "share", "formula"):
        parts.add_column(head, justify="right" if head in ("parameters", "share") else "left", overflow="fold")
    for row in one.components:
        parts.add_row(row.name, f"{row.parameters:,}", f"{row.share:.1%}", f"{row.symbols}\n= {row.numbers}")
    output().print(parts, highlight=False)
    output().print(", ".join(f"{letter} = {n:,}" for letter, n in one.counts.symbols.items()), style="dim")
    flops = one.training_flops
    lines = {
        "forward": (flops.forward, "2 for each weight in a product and token, and every query against all keys"),
        "backward": (flops.backward, "2 forward: the gradients of both operands of each product"),
        "full recompute adds": (flops.recomputed, "the forward pass of the layers once more"),
        "6 N": (flops.six_n, f"6 * {one.parameters}"),
        "- experts not met": (-flops.idle, f"-6 * {one.parameters - one.active_parameters}"),
        "+ lookups, norms, repeats": (flops.unlike, "weights in no product, less those in several"),
        "+ scores": (flops.scores, f"{flops.share_of_scores:.1%}: grows with the context, {one.context:,} tokens here"),
        "= training": (flops.training, "forward + backward"),
    }
    spent = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for head in ("FLOPs of a token in training", "", "made of"):
        spent.add_column(head, justify="left" if head else "right", overflow="fold")
    for what, (value, made_of) in lines.items():
        spent.add_row(what, f"{value:.4g}", made_of)
    output().print(spent, highlight=False)


def show_training(names: list[str], asked: dict[str, Any], dtype: str, as_json: bool) -> None:
    """The memory of a training step on one rank, by what it is for."""
    plans = {name: plan(preset(name), train=True, dtype=DTYPES[dtype], **asked) for name in names}
    if as_json:
        print(json.dumps([{"name": name, **one.to_dict()} for name, one in plans.items()]))
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("bytes of a rank")
    for name in plans:
        table.add_column(name, justify="right", overflow="fold", max_width=24)
    first = next(iter(plans.values()))
    for what in first.memory:
        table.add_row(what, *(size(one.memory[what]) for one in plans.values()))
    table.add_row("FLOPs of a step", *(f"{one.step_flops:.4g}" for one in plans.values()))
    output().print(table)
    told = f"weights in float32, products in {dtype}, {first.optimizer}, recompute {first.recompute}"
    ranks = f"{first.layout.dp} ranks, ZeRO stage {first.layout.zero}, {first.batch} sequences in all"
    output().print(f"{told}; {ranks}", style="dim", highlight=False)
