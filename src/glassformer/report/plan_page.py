"""Page of a plan: parameters, memory, time and layout of ranks, and every number with its formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..figures import (
    Markup,
    copyable,
    days,
    join,
    node_drawing,
    part_swatch,
    seconds,
    si,
    stacked_bar,
    tag,
)
from .html import caption, cell, figure, framed, scroll, section

UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
SUMS = ("total", "reserved", "needed")
MOMENTS = {"loss": "at the loss", "backward": "in the backward pass", "step": "at the step"}
RANKS_DRAWN = 192
"""Largest number of ranks in a drawing, which shows the first ones"""


def render_plan(plans: Sequence[dict[str, Any]], command: str) -> str:
    """Returns the page of the plans as HTML text, with the command that made them."""
    title = " and ".join(one["name"] for one in plans) if len(plans) < 3 else f"{len(plans)} models planned"
    keys = {
        "components": "Parameters",
        "layers": "One layer",
        "memory": "Memory",
        "time": "Time",
        "layout": "Layout",
        "decoding": "Decoding",
    }
    made: dict[str, list[Markup]] = {key: [] for key in keys}
    for one in plans:
        several = one["name"] if len(plans) > 1 else ""
        for key, part in (
            ("components", _components(one)), ("layers", _layers(one)), ("memory", _memory(one)), ("time", _time(one)),
            ("layout", _layout(one)), ("decoding", _decoding(one)),
        ):  # fmt: skip
            if part is not None:
                made[key].append(join([tag("h3", several) if several else None, part]))
    there = {key: (keys[key], section(key, keys[key], *parts)) for key, parts in made.items() if parts}
    header = tag(
        "header", tag("p", "Glassformer plan", class_="kicker"), tag("h1", title),
        *(tag("p", _finding(one), class_="finding") for one in plans), copyable(command) if command else None,
    )  # fmt: skip
    return framed(f"{title}: plan", header, there, list(plans), "plans", "figures")


def _finding(one: dict[str, Any]) -> str:
    """Returns the findings of a plan as sentences: parameters, and if planned memory, time, days, cost and decoding."""
    told = [f"{one['name']} has {si(one['parameters'])} parameters."]
    if "memory" in one:
        room = f" of {_bytes(one['machine_memory'])}" if "machine_memory" in one else ""
        over = one["memory"]["needed"] > one.get("machine_memory", float("inf"))
        told.append(
            f"Training takes {_bytes(one['memory']['needed'])}{room} on a rank"
            + (": it does not fit." if over else ".")
        )
    if "time" in one:
        time = one["time"]
        between = _span(time["low"], time["high"], seconds)
        told.append(
            f"A step of {one['batch']:,} x {one['context']:,} tokens takes {between} on {time['ranks']:,} "
            f"{one['machine_title']}; what takes longest: {time['bound']}."
        )
    if "run" in one:
        run = one["run"]
        cost = run["cost"] and f", {_span(run['cost'][0], run['cost'][1], '{:,.0f}'.format)} {run['cost'][2]}"
        between = _span(run["days_low"], run["days_high"], days)
        told.append(f"{si(run['tokens'])} tokens take {between} days{cost or ''}.")
    if one.get("fits") is False and "smallest" in one:
        enough = one["smallest"] and f"; {one['smallest_count']:,} {one['machine_title']} would hold it"
        told.append(f"It does not fit{enough or ''}.")
    if "decoding" in one:
        low, high = one["decoding"]["seconds"]
        told.append(f"A token takes {_span(low, high, seconds)} with {one['batch']:,} sequences at once.")
    return " ".join(told)


def _components(one: dict[str, Any]) -> Markup:
    rows = one["components"]
    bar = stacked_bar([(row["name"], row["parameters"]) for row in rows], "Parameters by component")
    letters = ", ".join(f"{letter} = {value:,}" for letter, value in one["symbols"].items())
    body = [
        (row["name"], f"{row['parameters']:,}", f"{row['share']:.1%}", _unfold(row["symbols"], f"= {row['numbers']}"))
        for row in rows
    ]
    return figure(bar, _table(f"Parameters of {one['name']}", ("component", "parameters", "share", "formula"), body),
                  caption(letters))  # fmt: skip


def _layers(one: dict[str, Any]) -> Markup | None:
    """Returns, for each kind of layer, a bar of the parameters of its matrices and a table of their parameters and
    FLOPs; None if the plan has no layers."""
    if "layers" not in one:
        return None
    return join(_layer(one["name"], layer) for layer in one["layers"])


def _layer(name: str, layer: dict[str, Any]) -> Markup:
    rows = layer["rows"]
    kept = [(row["name"], row["parameters"]) for row in rows]
    equal = f"{layer['times']:,} equal layers" if layer["times"] > 1 else "one layer"
    told = f"{layer['name']}, {equal}: {layer['parameters']:,} parameters, {layer['flops']:,.0f} FLOPs of a token."
    body = [
        (row["name"], f"{row['parameters']:,}", f"{row['share']:.1%}", f"{row['flops']:,.0f}",
         _unfold(row["symbols"], f"= {row['numbers']}" if row["numbers"] else ""))
        for row in rows
    ]  # fmt: skip
    heads = ("of one layer", "parameters", "share", "FLOPs", "formula")
    bar = stacked_bar(kept, f"Parameters of layer {layer['name']} by matrix")
    return figure(bar, _table(f"Layer {layer['name']} of {name}", heads, body), caption(told))


def _memory(one: dict[str, Any]) -> Markup | None:
    if "memory" not in one:
        return None
    memory, room = one["memory"], one.get("machine_memory")
    moments = one["moments"]
    parts = {
        name: value
        for name, value in memory.items()
        if name not in SUMS and (value or any(of.get(name) for of in moments.values()))
    }
    told = f"{_bytes(room)} there are" if room else ""
    bar = stacked_bar(list(parts.items()), "Memory of a rank by what it is for", room, told)
    rows = [
        (name, _some(value), f"{value / memory['needed']:.1%}",
         *(_some(of.get(name, 0)) for of in moments.values()))
        for name, value in parts.items()
    ]  # fmt: skip
    outside = "; outside of them are driver and links, or the process on a CPU" if memory["outside"] else ""
    words = (
        f"{_bytes(memory['needed'])} in all, {MOMENTS[one['fullest']]}, which holds most. The margin is what "
        f"allocators reserve beyond{outside}."
    )
    heads = ("of a rank", "bytes", "share", *(MOMENTS[name] for name in moments))
    return figure(bar, _table(f"Memory of {one['name']}", heads, rows), caption(words))


def _time(one: dict[str, Any]) -> Markup | None:
    if "time" not in one:
        return None
    time = one["time"]
    kinds = sorted(time["kinds"], key=lambda kind: -kind["seconds"])
    bar = stacked_bar([(kind["kind"], kind["seconds"]) for kind in kinds], "Time of a step by kind of work")
    rows = []
    for kind in kinds:
        of = f"= {kind['amount']:.4g} {kind['unit']} / {kind['rate']:.4g} {kind['unit']}/s" if kind["unit"] else ""
        share = kind["seconds"] / time["seconds"]
        rows.append((kind["kind"], seconds(kind["seconds"]), f"{share:.1%}", _unfold(kind["formula"], of)))
    if time["measured"]:
        told = f"{time['tokens_per_second']:,.0f} tokens a second, MFU {time['mfu']:.1%}, HFU {time['hfu']:.1%}."
    else:
        told = "No run of this machine with such a layout has been fitted: shares are those of the machines that were."
    return figure(bar, _table(f"Time of {one['name']}", ("of a step", "time", "share", "made of"), rows), caption(told))


def _layout(one: dict[str, Any]) -> Markup | None:
    if "time" not in one or one["time"]["ranks"] < 2:
        return None
    layout, ranks, node = one["layout"], one["time"]["ranks"], one["machine_node"]
    inner = ranks // layout["pp"]
    drawn = min(ranks, RANKS_DRAWN)
    by_stage = layout["pp"] > 1
    groups = [rank // inner if by_stage else rank // (layout["tp"] * layout["cp"]) for rank in range(drawn)]
    split = {"data": "dp", "tensor": "tp", "pipeline": "pp", "context": "cp", "experts": "ep"}
    told = [f"{layout[field]} {name}" for name, field in split.items() if layout[field] > 1]
    colours = "stage of layers" if by_stage else "copy of the model"
    more = f" The first {drawn:,} of {ranks:,} ranks." if drawn < ranks else ""
    read = f"A square is a rank, a frame a node, a colour a {colours}.{more}"
    words = f"{', '.join(told)}; ZeRO stage {layout['zero']}. {read}"
    return figure(node_drawing(groups, node, f"{ranks:,} ranks in nodes of {node}"), caption(words))


def _decoding(one: dict[str, Any]) -> Markup | None:
    if "decoding" not in one:
        return None
    found = one["decoding"]
    step, rate, first = found["seconds"], found["tokens_per_second"], found["first_token"]
    turn = found["turning_batch"]
    cost = found["cost_per_million"]
    rows = [
        ("time of a decoding step", _span(step[0], step[1], seconds),
         "what it reads / bandwidth, or what it computes / peak"),
        ("tokens a second", _span(rate[0], rate[1], "{:,.0f}".format), "of all sequences"),
        ("prefill of a full context", _span(first[0], first[1], seconds), "FLOPs of the prompt / peak"),
        ("compute-bound", "at no batch size" if turn is None else f"from {turn:,} sequences",
         "states grow faster" if turn is None else "where both take as long"),
        ("a million tokens", "–" if cost is None else f"{_span(cost[0], cost[1], '{:,.2f}'.format)} {cost[2]}",
         "hours x price"),
    ]  # fmt: skip
    head = tag("thead", tag("tr", *(tag("th", word, scope="col") for word in ("of decoding", "between", "made of"))))
    body = tag("tbody", *(tag("tr", tag("th", row[0], scope="row"), cell(row[1]), cell(row[2])) for row in rows))
    return scroll(f"Decoding of {one['name']}", tag("table", head, body))


def _table(label: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    """Returns an HTML table; a row is a name, shown with the coloured square of its part of the bar, and values."""
    head = tag("thead", tag("tr", *(tag("th", word, scope="col") for word in headings)))
    body = [
        tag("tr", tag("th", tag("span", part_swatch(index), row[0], class_="arm-label"), scope="row"),
            *(cell(value) for value in row[1:]))
        for index, row in enumerate(rows)
    ]  # fmt: skip
    return scroll(label, tag("table", head, tag("tbody", *body), class_="plan"))


def _unfold(formula: str, numbers: str) -> Markup:
    """Returns a formula as HTML that unfolds to show `numbers`; only the formula if they are empty."""
    if not numbers:
        return tag("code", formula)
    return tag("details", tag("summary", tag("code", formula)), tag("code", numbers))


def _bytes(value: float) -> str:
    scale, unit = next(((scale, unit) for scale, unit in UNITS if value >= scale), (1.0, "B"))
    return f"{value / scale:.3g} {unit}"


def _some(value: float) -> str:
    return _bytes(value) if value else "–"


def _span(low: float, high: float, told: Callable[[float], str]) -> str:
    return f"{told(low)} to {told(high)}"
