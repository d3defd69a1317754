"""Figure of the load of experts (shares of the assignments of tokens), and of ranks (processes) that hold experts."""

from __future__ import annotations

from collections.abc import Sequence

from ..figures import Axis, HeatColumn, HeatScale, Markup, fixed, heat_legend, heat_map, heat_scale, join, tag
from ..figures.heat import MOST_COLUMNS
from ..runs.arms import Arm, RecordedDynamics
from .curves import switch
from .html import arm_label, caption, scroll

RANKS = (2, 4, 8)
"""Numbers of ranks for the maps of shared experts, if they divide the number of experts"""
EXPERTS = 1  # `key` of the maps with a column for each expert

Drawn = tuple[Arm, RecordedDynamics]


def experts_figure(watched: Sequence[Drawn]) -> Markup | None:
    """Returns the figure of expert load: heat maps by layer and expert and by layer and rank, and a table of the
    busiest ranks; None if no map can be drawn."""
    found = [(arm, seen) for arm, seen in watched if seen.experts]
    if not found:
        return None
    panels = {key: maps for key in (EXPERTS, *RANKS) if (maps := _maps(found, key))}
    if not panels:
        return None
    drawn = [column for maps in panels.values() for _, columns, _ in maps for column in columns]
    every = [value for column in drawn for value in column.values]
    scale = heat_scale("Load over its even share; 1: level", every, low=0)
    options = [(str(key), "each expert" if key == EXPERTS else f"{key} ranks") for key in panels]
    return tag(
        "figure", tag("h3", "Load of the experts"),
        tag("div", switch("load", "Load of", options), class_="switches"),
        *(_panel(key, maps, scale) for key, maps in panels.items()),
        caption("Mean over the last quarter of the run, for the tokens that --watch reads; the first layer is at "
                "the bottom. Ranks take the experts in order, as under --layout ep=2, whether or not this run had "
                "several ranks."),
        _table(found), class_="heats",
    )  # fmt: skip


def shared(load: Sequence[float], ranks: int) -> list[float]:
    """Returns the load of each of `ranks` ranks that hold the experts in order; 1 is an even share."""
    each = len(load) // ranks
    return [sum(load[rank * each : (rank + 1) * each]) * ranks for rank in range(ranks)]


def _fits(seen: RecordedDynamics, ranks: int) -> bool:
    return all(len(load) % ranks == 0 for load in seen.experts.values())


Map = tuple[Arm, list[HeatColumn], list[str]]


def _maps(found: Sequence[Drawn], key: int) -> list[Map]:
    """Returns (arm, columns, names of the layers) of the heat map of expert load for each arm: a column for each expert
    (`key` 1) or each of `key` ranks.

    An arm with too many experts, or with ranks of unequal numbers of experts, is left out."""
    maps: list[Map] = []
    for arm, seen in found:
        most = max(map(len, seen.experts.values()))
        count = most if key == EXPERTS else key
        if count > MOST_COLUMNS or not _fits(seen, 1 if key == EXPERTS else key):
            continue
        rows = [shared(load, len(load) if key == EXPERTS else key) for load in seen.experts.values()]
        word = "expert" if key == EXPERTS else "rank"
        columns = [
            HeatColumn(i - 0.5, i + 0.5, [row[i] if i < len(row) else None for row in rows], f"{word} {i}")
            for i in range(count)
        ]
        maps.append((arm, columns, [str(layer) for layer in seen.experts]))
    return maps


def _panel(key: int, maps: Sequence[Map], scale: HeatScale) -> Markup:
    word = "Expert" if key == EXPERTS else "Rank"
    pieces = []
    for arm, columns, layers in maps:
        most, layer, which = max((float(v), name, c.name) for c in columns  # type: ignore[arg-type]
                                 for v, name in zip(c.values, layers, strict=True) if v is not None)  # fmt: skip
        title = f"Load by layer and {word.lower()}, {arm.name}. Highest: {fixed(most)}, {which}, layer {layer}."
        picture = heat_map(columns, layers, scale, Axis(word, low=-0.5, high=len(columns) - 0.5), title, "Layer")
        pieces.append(tag("figure", tag("figcaption", arm_label(arm)), picture))
    return tag("div", heat_legend(scale), tag("div", *pieces, class_="maps"), class_=f"panel panel-load-{key}")


def _table(found: Sequence[Drawn]) -> Markup:
    """Returns the table, by arm and number of ranks, of the busiest rank's load and of the share of rows sent to
    others."""
    names = ("Arm", "Ranks", "Busiest rank", "Mean over layers", "Rows sent to other ranks")
    heads = [tag("th", words, scope="col") for words in names]
    rows = []
    for arm, seen in found:
        for ranks in (ranks for ranks in RANKS if _fits(seen, ranks)):
            most = {layer: max(shared(load, ranks)) for layer, load in seen.experts.items()}
            worst = max(most, key=most.__getitem__)
            cells = (f"{ranks}", f"{fixed(most[worst])} (layer {worst})", fixed(sum(most.values()) / len(most)),
                     f"{100 * (ranks - 1) / ranks:.1f} %")  # fmt: skip
            rows.append(tag("tr", tag("th", arm_label(arm), scope="row"), *(tag("td", cell) for cell in cells)))
    if not rows:
        return join([])
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="events")
    words = (
        "Busiest rank: the rows that it computes in a layer over an even share; the others wait for it. Rows sent: "
        "where the tokens of all ranks choose alike; their results come back the same way."
    )
    return join([scroll("Experts over ranks", table), caption(words)])
