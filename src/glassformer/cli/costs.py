"""What models cost, side by side."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import partial
from typing import Any

import torch
from rich.table import Table

from glassformer.errors import RequestError
from glassformer.figures import days
from glassformer.figures.terminal import output, size
from glassformer.naming import preset
from glassformer.planning import Plan, plan, search
from glassformer.planning.advice import advice
from glassformer.planning.counts import Counts, component_table
from glassformer.planning.decoding import Decoding
from glassformer.planning.machines import Cluster
from glassformer.planning.memory import TrainingMemory
from glassformer.planning.time import DAY, RunTime, StepTime
from glassformer.planning.training import TrainingPlan, check_workload
from glassformer.report.plan import MOMENTS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}

PLACED = {"machine", "nodes", "machines", "price"}
TRAINED = {"context", "batch", "dtype", *PLACED, "explain", "out", "tokens", "optimizer"}
TAKES = {
    "generate": {"context", "batch", "dtype", *PLACED, "explain", "out", "state_dtype", "weights"},
    "train": {*TRAINED, "recompute", "layout", "weights", "loss", "finetune"},
    "find": TRAINED,
    "here": {"context", "batch", "again"},
}
"""Which options each mode of `plan` has; others are refused."""
UNSAID = {"batch": 1, "dtype": "bfloat16", "nodes": 1, "optimizer": "adamw", "recompute": "none", "loss": "chunked"}
"""What options are where nobody gives them; others None or False."""

STATE = "state of a sequence"
WEIGHTS = "weights"
ROWS: dict[str, Callable[[Plan], str]] = {
    "parameters": lambda one: f"{one.parameters:,}",
    "of them for a token": lambda one: f"{one.active_parameters:,}",
    WEIGHTS: lambda one: size(one.weight_bytes),
    "context": lambda one: f"{one.context:,}",
    STATE: lambda one: size(one.state_bytes) if one.states else "none",
    "state per token": lambda one: f"{one.state_bytes_per_token:,.0f} B",
    "one token more adds": lambda one: f"{one.next_token_bytes:,} B",
    "weights and states": lambda one: size(one.bytes),
    "read by a step": lambda one: size(one.bytes_read),
    "FLOPs per token": lambda one: f"{one.flops:.3g}",
}


def span(low: float, high: float, told: Callable[[float], str] = "{:.3g}".format, unit: str = "") -> str:
    """An interval in words."""
    return f"{told(low)} to {told(high)}{unit and ' '}{unit}"


def money(cost: tuple[float, float, str] | None) -> str:
    if cost is None:
        return "no price known"
    return span(cost[0], cost[1], lambda value: f"{value:,.2f}" if value < 100 else f"{value:,.0f}", cost[2])


def _milliseconds(seconds: tuple[float, float]) -> str:
    return span(1000 * seconds[0], 1000 * seconds[1], unit="ms")


DECODING: dict[str, Callable[[Decoding], str]] = {
    "time of a step": lambda one: _milliseconds(one.seconds),
    "tokens a second": lambda one: span(*one.tokens_per_second),
    "a prompt that fills it": lambda one: _milliseconds(one.first_token),
    "bound by products from": lambda one: (
        "no batch: states grow" if one.turning_batch is None else f"{one.turning_batch:,} sequences"
    ),
    "a million tokens cost": lambda one: money(one.cost_per_million),
}


def _priced(on: Cluster) -> str:
    """The machines, and where their price is from."""
    price, machine = on.machine.price, on.machine
    told = f"on {on.count} {machine.title}" if on.count > 1 else f"on {machine.title}"
    if price is None:
        return told
    hour = f"{price.low:g}" if price.low == price.high else f"{price.low:g} to {price.high:g}"
    source = "" if price.source == "as given" else f" ({price.date}, {price.source})"
    return f"{told}, {hour} {price.currency} an hour{source}"


def show_plan(names: list[str], modes: list[str], flags: dict[str, Any], as_json: bool) -> None:
    """Models, planned in one of the modes of `TAKES`: that of generation, where none is named. Raises RequestError for
    an option that the mode does not have."""
    if len(modes) > 1 and modes != ["train", "find"]:
        raise RequestError(
            f"give one of {' and '.join(f'--{mode}' for mode in modes)} at a time", code="conflict",
            field=modes[0], value=modes,
        )  # fmt: skip
    mode = modes[-1] if modes else "generate"
    said = {name: value for name, value in flags.items() if value is not None and value is not False}
    given = {name: value for name, value in said.items() if value != UNSAID.get(name)}
    if wrong := [name for name in given if name not in TAKES[mode]]:
        takers = [f"--{other}" for other, taken in TAKES.items() if taken >= set(wrong)]
        told = " and ".join(f"--{name.replace('_', '-')}" for name in wrong)
        not_for = "a plan of generation" if mode == "generate" else f"--{mode}"
        are = "is" if len(wrong) == 1 else "are"
        advised = f"but for {' and '.join(takers)}" if takers else "leave them out" if wrong[1:] else "leave it out"
        raise RequestError(
            f"{told} {are} not for {not_for}{',' if takers else ';'} {advised}",
            code="conflict", field=wrong[0], value=given[wrong[0]], expected="left out",
        )  # fmt: skip
    if not names:
        raise RequestError("plan needs at least one model, such as llama-7b", code="missing", field="models")
    asked = {name: value for name, value in flags.items() if name in TAKES[mode]}
    for name in ("dtype", "state_dtype"):
        if asked.get(name) is not None:
            asked[name] = DTYPES[asked[name]]
    generating = partial(show_plans, needed=bool(modes))
    shows: dict[str, Callable[..., None]] = {"train": show_training, "find": show_found, "here": show_here}
    shows.get(mode, generating)(names, as_json, **asked)


def show_plans(
    names: list[str], as_json: bool, explain: bool, out: str | None, needed: bool = False, **asked: Any
) -> None:
    """What models are made of, and what generating with them takes; `needed`: one that writes nothing is refused."""
    plans = {name: plan(preset(name), **asked) for name in names}
    if needed:
        for name, one in plans.items():
            if not one.config.writes:
                raise RequestError(
                    f"{name} reads in both directions and writes no text; leave out --generate, or plan its --train",
                    code="conflict", field="generate", value=name,
                )  # fmt: skip
    first = next(iter(plans.values()))
    on = first.on
    _write_page(plans, out)
    if as_json:
        print(json.dumps([{"name": name, **one.to_dict()} for name, one in plans.items()]))
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    for name in plans:
        table.add_column(name, justify="right", overflow="fold", max_width=24)
    kinds = dict.fromkeys(kind for one in plans.values() for kind in one.states)
    for what, told in ROWS.items():
        table.add_row(what, *map(told, plans.values()))
        for kind in kinds if what == STATE else ():
            held = [one.states.get(kind, 0) for one in plans.values()]
            table.add_row(f"  {kind}", *(size(value) if value else "" for value in held))
        for kept in first.weights_in if what == WEIGHTS else ():
            table.add_row(f"  in {kept}", *(size(one.weights_in[kept]) for one in plans.values()))
    if on is not None:
        table.add_row(f"fits on {on.count} {on.name}", *map(_fits, plans.values()))
        for what, of_plan in FITTING.items():
            table.add_row(what, *map(of_plan, plans.values()))
        for what, of in DECODING.items() if any(one.decoding is not None for one in plans.values()) else ():
            table.add_row(what, *("" if one.decoding is None else of(one.decoding) for one in plans.values()))
    output().print(table)
    rows = "one sequence" if first.batch == 1 else f"{first.batch} sequences"
    state = str(first.state_dtype).removeprefix("torch.")
    kept_in = f"weights in {first.weights}, state in {state}, {rows} of that context"
    source = "; a source is as long" if any(one.config.encoder is not None for one in plans.values()) else ""
    output().print(kept_in + source, style="dim", highlight=False)
    if on is not None:
        output().print(_priced(on), style="dim", highlight=False)
    if explain:
        for name, one in plans.items():
            show_explained(name, one)


FITTING: dict[str, Callable[[Plan], str]] = {
    "sequences that fit": lambda one: f"{one.batch_that_fits(one.room or 0):,}",
    "context that fits": lambda one: f"{one.context_that_fits(one.room or 0):,}",
}


def _fits(one: Plan) -> str:
    return "yes" if one.fits else f"no: {one.smallest_count:,} would do"


def show_explained(name: str, one: Plan) -> None:
    """Every figure of a model with the formula that it was made by."""
    output().print(component_table(one.components, name), highlight=False)
    output().print(", ".join(f"{letter} = {n:,}" for letter, n in one.counts.symbols.items()), style="dim")
    flops = one.training_flops
    unmet = {"- experts not met": (-flops.idle, f"-6 * {one.parameters - one.active_parameters}")} if flops.idle else {}
    lines = {
        "forward": (flops.forward, "2 for each weight in a product and token, and every query against all keys"),
        "backward": (flops.backward, "2 forward: the gradients of both operands of each product"),
        "full recompute adds": (flops.recomputed, "the forward pass of the layers once more"),
        "6 N": (flops.six_n, f"6 * {one.parameters}"),
        **unmet,
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
    layers = f"{one.config.n_layers} layers" if one.config.n_layers > 1 else "one layer"
    output().print(f"forward, {layers}, {one.context:,} tokens: {one.forward_of_layers:,} FLOPs", highlight=False)


def _write_page(plans: Mapping[str, Plan | TrainingPlan], out: str | None) -> None:
    """The page of these plans, where one is asked for."""
    if out is None:
        return
    from glassformer.report.plan import write_plan

    pages = []
    for name, one in plans.items():
        counts = Counts(one.config)
        placed = {} if one.on is None else {
            "machine_title": one.on.machine.title, "machine_memory": one.on.machine.memory, "machine_node": one.on.node,
        }  # fmt: skip
        components = [asdict(part) for part in counts.components]
        named = {"name": name, "parameters": one.config.num_params(), "symbols": counts.symbols}
        pages.append({**one.to_dict(), **named, **placed, "components": components})
    write_plan(pages, shlex.join(["glassformer", *sys.argv[1:]]), out)


def show_here(names: list[str], as_json: bool, batch: int, context: int | None, again: bool) -> None:
    """A training step and a step of decoding on this processor, planned."""
    from glassformer.planning.here import here, profile

    configs = {name: preset(name) for name in names}
    sizes = {name: config.context if context is None else context for name, config in configs.items()}
    for name, config in configs.items():  # before a minute of measuring
        check_workload(config, batch, sizes[name])
    by = profile(again)
    found = {name: here(config, batch, sizes[name], by) for name, config in configs.items()}
    if as_json:
        print(json.dumps([{"name": name, "batch": batch, **one.to_dict()} for name, one in found.items()]))
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    for name in found:
        table.add_column(name, justify="right", overflow="fold", max_width=32)
    table.add_row("a training step", *(f"{1e3 * one.step_seconds:,.3g} ms" for one in found.values()))
    for part in next(iter(found.values())).step:
        table.add_row(f"  {part}", *(f"{one.step[part] / one.step_seconds:.0%}" for one in found.values()))
    table.add_row("tokens a second", *(f"{one.tokens / one.step_seconds:,.0f}" for one in found.values()))
    for one in found.values():
        if one.token_seconds is None:
            break
    else:
        steps = [one.token_seconds or 0.0 for one in found.values()]
        table.add_row("a step of decoding", *(f"{1e3 * step:,.3g} ms" for step in steps))
        table.add_row("tokens written a second", *(f"{batch / step:,.0f}" for step in steps))
    output().print(table)
    told = f"{by.processor}, {by.threads} threads, eager, products in {by.dtype} in training and float32 in decoding"
    output().print(f"{told}; --again measures anew", style="dim", highlight=False)


def show_training(names: list[str], as_json: bool, explain: bool, out: str | None, **asked: Any) -> None:
    """A training step: the memory of one rank by what it is for, and on a machine its time."""
    plans = {name: plan(preset(name), train=True, **asked) for name in names}
    _write_page(plans, out)
    if as_json:
        print(json.dumps([{"name": name, **one.to_dict()} for name, one in plans.items()]))
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("bytes of a rank")
    for name in plans:
        table.add_column(name, justify="right", overflow="fold", max_width=32)
    first = next(iter(plans.values()))
    table.add_row("where it holds most", *(MOMENTS[one.fullest] for one in plans.values()))
    for what in first.memory:
        if any(one.memory[what] for one in plans.values()) and (first.on is not None or what != "needed"):
            table.add_row(what, *(size(one.memory[what]) for one in plans.values()))
    table.add_row("FLOPs of a step", *(f"{one.step_flops:.4g}" for one in plans.values()))
    if first.on is not None:
        has = first.on.machine.memory
        shares = [one.memory["needed"] / has for one in plans.values()]
        table.add_row(f"of {size(has)}", *(f"{share:.0%}{', does not fit' * (share > 1)}" for share in shares))
    steps = [one.time for one in plans.values() if one.time is not None]
    runs = [one.run for one in plans.values() if one.run is not None]
    for what, of_step in STEP.items() if steps else ():
        table.add_row(what, *map(of_step, steps))
    for what, of_run in RUN.items() if runs else ():
        table.add_row(what, *map(of_run, runs))
    output().print(table)
    kept = f"weights in {str(first.weights).removeprefix('torch.')}"
    kept += f" and frozen, adapters of rank {first.rank} in float32" if first.rank else ""
    told = (
        f"{kept}, products in {str(first.dtype).removeprefix('torch.')}, {first.optimizer}, recompute {first.recompute}"
    )
    layout = first.layout
    kinds = {"data": layout.dp, "tensor": layout.tp, "pipeline": layout.pp, "context": layout.cp}
    split = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count > 1)
    shared = f" ({split})" if layout.ranks > layout.dp else ""
    ranks = f"{layout.ranks} ranks{shared}, ZeRO stage {layout.zero}" if layout.ranks > 1 else "one rank"
    sequences = f"{first.batch} sequences in all" if first.batch > 1 else "one sequence"
    output().print(f"{told}; {ranks}, {sequences}", style="dim", highlight=False)
    if first.on is not None:
        output().print(_priced(first.on), style="dim", highlight=False)
        if not steps[0].measured:
            why = f"no training run of {first.on.machine.title} with such a layout has been fitted: times are a range"
            output().print(why, style="dim", highlight=False)
        for name, one in plans.items():
            _show_advice(name, one)
    if explain:
        for name, one in plans.items():
            _show_moments(name, one)
            _show_kinds(name, one)
            _show_collectives(name, one)


def show_found(names: list[str], as_json: bool, explain: bool, out: str | None, **asked: Any) -> None:
    """The layouts that fit, the fastest first, and the faster ones that do not; more of the fastest."""
    if asked["machine"] is None:
        raise RequestError(
            "--find searches the layouts of a --machine, such as h100:8", code="missing", field="machine"
        )
    found = {name: search(preset(name), **asked) for name in names}
    best = {name: one.fitting[0] for name, one in found.items() if one.fitting}
    if out is not None and (lost := [name for name in names if name not in best]):
        raise RequestError(
            f"{lost[0]} fits no layout that was tried: no page of it can be written; leave out --out",
            code="conflict", field="out", value=out,
        )  # fmt: skip
    _write_page(best, out)
    if as_json:
        print(json.dumps([{"name": name, **one.to_dict()} for name, one in found.items()]))
        return
    for name, one in found.items():
        has = one.on.machine.memory
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), title=name, title_justify="left")
        for head in ("layout", "a step", "tokens a second", "needed", f"of {size(has)}"):
            table.add_column(head, justify="left" if head == "layout" else "right", overflow="fold")
        for plan_of in one.fitting:
            if (step := plan_of.time) is not None:
                memory = plan_of.memory["needed"]
                rate = f"{step.tokens_per_second:,.0f}"
                table.add_row(str(plan_of.layout), f"{step.seconds:.3g} s", rate, size(memory), f"{memory / has:.0%}")
        if one.fitting:
            output().print(table, highlight=False)
        for large in one.too_large[:3]:
            told = f"{large.layout} would take {large.seconds:.3g} s and does not fit: {size(large.needed)}"
            output().print(f"{told}, {large.reason}", style="dim", highlight=False)
        if not one.fitting:
            tried = "no layout" if one.exhausted else f"none of the {one.tried} layouts tried"
            told = f"{name} fits {tried} of {one.on.count} {one.on.name} with a batch of {one.batch:,}"
            if one.smallest is not None:
                larger = f" with a batch of {one.smallest.batch:,}" if one.smallest.batch != one.batch else ""
                told += (
                    f"; {one.smallest.ranks} in nodes of {one.smallest.node} would do{larger}: {one.smallest.layout}"
                )
            else:
                told += ", nor the leanest of any larger number"
            output().print(told, highlight=False)
        told = f"{one.possible:,} layouts of a batch of {one.batch:,}, the memory of {one.tried} planned"
        few = one.batch < one.on.count
        told += ": too small for a copy of the model on each; --batch gives a larger one" if few else ""
        output().print(told, style="dim", highlight=False)
        for told in [f"{what}: {of(run)}" for what, of in RUN.items()] if (run := _run(best.get(name))) else ():
            output().print(told, highlight=False)
        if explain and name in best:
            _show_moments(name, best[name])
            _show_kinds(name, best[name])
            _show_collectives(name, best[name])


def _run(one: TrainingPlan | None) -> RunTime | None:
    return None if one is None else one.run


STEP: dict[str, Callable[[StepTime], str]] = {
    "time of a step": lambda one: _likely(one, 1000, "ms"),
    "tokens a second": lambda one: (
        f"{one.tokens_per_second:,.0f}"
        if one.measured
        else span(one.tokens / one.high, one.tokens / one.low, "{:,.0f}".format)
    ),
    "MFU, with recomputation HFU": lambda one: (
        f"{one.mfu:.1%}, {one.hfu:.1%}"
        if one.measured
        else span(one.mfu * one.seconds / one.high, one.mfu * one.seconds / one.low, "{:.1%}".format)
    ),
    "longest": lambda one: one.bound,
}
RUN: dict[str, Callable[[RunTime], str]] = {
    "days": lambda one: span(one.low / DAY, one.high / DAY, days),
    "accelerator hours": lambda one: span(
        one.hours * one.low / one.seconds, one.hours * one.high / one.seconds, "{:,.0f}".format
    ),
    "energy, at most": lambda one: f"{one.energy * one.high / one.seconds:,.0f} kWh",
    "cost": lambda one: money(one.cost()),
}


def _likely(step: StepTime, times: float, unit: str) -> str:
    """Number and interval, or where nothing was measured the interval alone."""
    between = span(times * step.low, times * step.high, "{:,.4g}".format, unit)
    return f"{times * step.seconds:,.4g} {unit}, {between}" if step.measured else between


def _show_advice(name: str, one: TrainingPlan) -> None:
    """The changes that would save most, of the layout and of the machine."""
    found = advice(one)
    layouts = [change for change in found if change.layout is not None][:1]
    machines = [change for change in found if change.layout is None][:1]
    told = [f"{change.words} saves {change.saves:.0%} of a step" for change in (*layouts, *machines)]
    if told:
        output().print(f"{name}: {'; '.join(told)}", highlight=False)


def _show_moments(name: str, one: TrainingPlan) -> None:
    """Bytes of the fullest rank by what they are for, at each moment of a step."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), title=name, title_justify="left")
    table.add_column("bytes of a rank")
    for moment in one.moments:
        table.add_column(MOMENTS[moment], justify="right")
    for what in (field.name for field in fields(TrainingMemory)):
        values = [getattr(memory, what) for memory in one.moments.values()]
        if any(values):
            table.add_row(what, *(size(value) if value else "" for value in values))
    table.add_row("total", *(size(memory.total) for memory in one.moments.values()), style="bold")
    output().print(table, highlight=False)


def _show_collectives(name: str, one: TrainingPlan) -> None:
    """Operations between ranks, exactly as the trainer makes them."""
    if not one.collectives:
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), title=name, title_justify="left")
    for head in ("between ranks of", "operation", "a step", "bytes"):
        table.add_column(head, justify="right" if head in ("a step", "bytes") else "left")
    for each in one.collectives:
        table.add_row(each.axis, each.operation, f"{each.count:,}", size(each.bytes))
    output().print(table, highlight=False)


def _show_kinds(name: str, one: TrainingPlan) -> None:
    """Where the time of a step goes, with the formula of each amount."""
    if one.time is None:
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), title=name, title_justify="left")
    for head in ("time of a step", "share", "roofline", "planned", "made of"):
        table.add_column(head, justify="left" if head in ("time of a step", "made of") else "right", overflow="fold")
    for kind in sorted(one.time.kinds, key=lambda kind: -kind.seconds):
        share = kind.seconds / one.time.seconds
        amount = f"{kind.amount:.4g} {kind.unit} / {kind.rate:.4g} {kind.unit}/s" if kind.unit else f"{kind.amount:.3g}"
        table.add_row(
            kind.kind, f"{share:.1%}", f"{1000 * kind.roof:.4g} ms", f"{1000 * kind.seconds:.4g} ms",
            f"{kind.formula}\n= {amount}",
        )  # fmt: skip
    output().print(table, highlight=False)
