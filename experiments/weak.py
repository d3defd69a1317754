"""docs/weak_scaling.md: a model of 8 B parameters from 8 to 1,024 GPUs, predicted on paper for three layouts.

python -m experiments.weak writes the page and its figure. Nothing is measured: times are those of
`glassformer.planning`, and once more with the collectives that the trainer makes."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import glassformer as gf
from experiments.docs import DOCS
from experiments.plan import published
from experiments.plan.document import table
from experiments.svg import panels
from glassformer.figures import Axis, Series, line_chart
from glassformer.planning.collectives import Collective
from glassformer.planning.machines import Machine, TimeFactors, cluster
from glassformer.planning.time import LINKS, StepTime
from glassformer.planning.training import TrainingPlan

PAGE, FIGURE = DOCS / "weak_scaling.md", DOCS / "figures" / "weak_scaling.svg"
MODEL, NODE = "llama-3-8b", "h100:8"
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
"""GPUs. Each computes one sequence of the model's context in a step."""
LAYOUTS: dict[str, Callable[[int], str]] = {
    "FSDP": lambda ranks: f"fsdp={ranks}",
    "Hybrid": lambda ranks: f"fsdp={node()},replicate={ranks // node()}",
    "FSDP + TP": lambda ranks: f"fsdp={ranks // 2},tp=2,sp=1",
}
GENERATED = "<!-- `python -m experiments.weak` writes this page. -->"
LATENCY = 100e-6
"""Seconds added to each collective, to show the effect of latencies."""
EXCHANGES = {
    "fsdp all-gather": "gathers of weights",
    "fsdp all-to-all": "sums of gradients",
    "replicate": "sums among replicas",
    "tp": "activations of TP",
}
"""Exchanged tensors, by axis and operation, or by axis only."""


def node() -> int:
    return cluster(NODE).node


@dataclass(frozen=True)
class Exchange:
    """A collective among `size` ranks, neighbours `stride` apart: bytes of a rank, and the seconds that links allow.

    As in `planning/time.py`, gathers and reductions combine within a node the bytes that cross its boundary, so that
    its GPUs share them; in an all-to-all each GPU's bytes cross separately."""

    made: Collective
    size: int
    stride: int
    machine: Machine

    @property
    def near(self) -> int:
        """Ranks of the group in one node."""
        return max(1, min(self.size, node() // self.stride)) if self.stride < node() else 1

    @property
    def sent(self) -> float:
        """Bytes that a rank sends."""
        return self._passes * (1 - 1 / self.size) * self.made.bytes

    @property
    def crossing(self) -> float:
        """Bytes that a rank sends to other nodes, on average over the GPUs of a node."""
        shared = 1 if self._traded else self.near
        return self._passes * (1 - self.near / self.size) / shared * self.made.bytes

    def seconds(self, between: float | None = None) -> float:
        """Returns the seconds over links at full speed; `between` replaces the bandwidth between nodes, in bytes/s."""
        return max(self.crossing / (between or self.machine.between), self._within / self.machine.inside)

    @property
    def leaves(self) -> bool:
        """True if the link between nodes takes longer than the link within."""
        return self.crossing / self.machine.between > self._within / self.machine.inside

    @property
    def name(self) -> str:
        return EXCHANGES.get(f"{self.made.axis} {self.made.operation}") or EXCHANGES[self.made.axis]

    @property
    def _within(self) -> float:
        if self.near == 1:
            return 0.0
        return (self.near - 1) / self.size * self.made.bytes if self._traded else self.sent

    @property
    def _traded(self) -> bool:
        return self.made.operation == "all-to-all"

    @property
    def _passes(self) -> int:
        return 2 if self.made.operation == "all-reduce" else 1


@dataclass(frozen=True)
class Row:
    """A layout on `ranks` GPUs, with its plan."""

    ranks: int
    words: str
    """Layout as text: "fsdp=8,tp=2"."""
    plan: TrainingPlan

    @property
    def planned(self) -> StepTime:
        assert self.plan.time is not None
        return self.plan.time

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        layout, machine = self.plan.layout, self.planned.cluster.machine
        copies = layout.dp // layout.fsdp
        places = {
            "tp": (layout.tp, 1),
            "fsdp": (layout.fsdp, layout.tp),
            "replicate": (copies, layout.tp * layout.fsdp),
        }
        return tuple(Exchange(one, *places[one.axis], machine) for one in self.plan.collectives)

    @property
    def computing(self) -> float:
        """Planned seconds of a step without exchanges."""
        return sum(one.seconds for one in self.planned.kinds if one.kind not in LINKS)

    @property
    def planned_exchanging(self) -> float:
        return self.planned.seconds - self.computing

    def exchanging(self, between: float | None = None) -> float:
        """Returns the seconds of the trainer's collectives, one after another; `between` as in `Exchange.seconds`."""
        return factors().links * sum(one.seconds(between) for one in self.exchanges)

    @property
    def seconds(self) -> float:
        """Seconds of a step with the trainer's collectives."""
        return self.computing + self.exchanging()

    @property
    def sent(self) -> float:
        return sum(one.sent for one in self.exchanges)

    @property
    def crossing(self) -> float:
        return sum(one.crossing for one in self.exchanges)

    @property
    def longest(self) -> str:
        """Name of the exchange that takes longest, and its slower link."""
        spent: dict[str, float] = {}
        links: dict[str, bool] = {}
        for one in self.exchanges:
            spent[one.name] = spent.get(one.name, 0.0) + one.seconds()
            links[one.name] = one.leaves
        name = max(spent, key=spent.__getitem__)
        return f"{name}, {'between' if links[name] else 'within'} nodes"

    @property
    def break_even(self) -> float | None:
        """Bandwidth between nodes, in bytes/s, at which exchanges take as long as computing; None within one node."""
        if not self.crossing:
            return None
        low, high = 1e6, 1e15
        for _ in range(100):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.exchanging(middle) > self.computing else (low, middle)
        return high


@cache
def rows() -> dict[str, tuple[Row, ...]]:
    """Returns {layout: rows by increasing number of GPUs}."""
    return {name: tuple(planned(ranks, layout(ranks)) for ranks in SIZES) for name, layout in LAYOUTS.items()}


@cache
def planned(ranks: int, layout: str) -> Row:
    nodes = ranks // node()
    return Row(
        ranks, layout, gf.plan(gf.preset(MODEL), train=True, batch=ranks, layout=layout, machine=NODE, nodes=nodes)
    )


def factors() -> TimeFactors:
    found = cluster(NODE).machine.measured
    assert found is not None
    return found


def rate(row: Row, seconds: float) -> float:
    """Returns tokens per second and GPU."""
    return row.planned.tokens / seconds / row.ranks


def efficiencies(seconds: Sequence[float]) -> list[float]:
    """Returns the weak-scaling efficiency of each step time: the first over it."""
    return [seconds[0] / each for each in seconds]


def page() -> str:
    parts = [
        GENERATED, "# Weak scaling on paper", *_introduction(),
        "![Tokens per second and GPU from 8 to 1,024 GPUs, as planned and with the trainer's collectives]"
        "(figures/weak_scaling.svg)",
        "Left: the planner's own times, in which the hybrid layout's sums among replicas are missing. Right: the same "
        "computing with the collectives that the trainer makes. Why they differ is explained below the "
        "first table.",
        "## What is assumed", *_assumptions(),
        "## What `glassformer plan` predicts", *_plan(),
        "## With the collectives that the trainer makes", *_trainer(),
        "## What limits each layout", *_limits(),
        "## How far to trust it", *_trust(),
    ]  # fmt: skip
    return (
        "\n\n".join(part if part.startswith(("|", "!", "<", "#", "`" * 3)) else _wrapped(part) for part in parts) + "\n"
    )


def _wrapped(words: str) -> str:
    """Paragraphs and items of a list, in lines of 120 signs."""
    return "\n".join(
        textwrap.fill(line, 120, subsequent_indent="  " if line.startswith("- ") else "", break_on_hyphens=False,
                      break_long_words=False)
        for line in words.split("\n")
    )  # fmt: skip


def _introduction() -> Iterator[str]:
    context = rows()["FSDP"][0].plan.context
    yield (
        f"How fast would {MODEL} train on {SIZES[0]:,} to {SIZES[-1]:,} GPUs if the work of each GPU stayed the same? "
        "**This page is a prediction on paper. Nothing on it was measured on a GPU.** Times come from "
        "`glassformer.planning`, bytes from its exact counts of collectives, and `python -m experiments.weak` writes "
        "the page from them."
    )
    yield (
        f"Each GPU computes one sequence of {context:,} tokens in a step, so that the batch grows from "
        f"{SIZES[0] * context:,} to {SIZES[-1] * context:,} tokens. Whether training benefits from a batch that large "
        "is a separate question. Three layouts are compared ([what the words mean](clusters.md)):"
    )
    last, first = SIZES[-1], SIZES[0]
    yield "\n".join(
        f"- **{name}**: {what}, `{layout(first)}` to `{layout(last)}`."
        for (name, layout), what in zip(
            LAYOUTS.items(),
            ("weights, gradients and moments are sharded over all GPUs",
             "they are sharded within each node and replicated across nodes",
             "two neighbouring GPUs share each matrix and two sequences; the rest is sharded over all pairs"),
            strict=True,
        )
    )  # fmt: skip


def _assumptions() -> Iterator[str]:
    first = rows()["FSDP"][0]
    machine, fitted = cluster(NODE).machine, factors()
    peak = machine.peak_of("bfloat16")
    hops = SIZES[-1] - 1
    yield "\n".join([
        f"- **Model.** {MODEL}, {first.plan.config.num_params():,} parameters; products in bf16; weights, gradients "
        "and the two moments of AdamW in fp32; nothing is recomputed.",
        f"- **Machine.** {machine.title}: {machine.memory / 1e9:.0f} GB, {peak / 1e12:,.1f} TFLOP/s in bf16, "
        f"{machine.bandwidth / 1e12:.2f} TB/s of memory bandwidth, {node()} in a node.",
        f"- **Links.** {machine.inside / 1e9:.0f} GB/s within a node and {machine.between / 1e9:.0f} GB/s between "
        "nodes, per GPU and direction, the same at every size, without contention or slower tiers of switches.",
        f"- **Achieved speed.** Measured training runs took {fitted.products:g} times as long as the peak allows for "
        f"matrix products ({1 / fitted.products:.0%} of the peak), {fitted.scores:g} times for attention scores "
        f"({1 / fitted.scores:.0%}), {fitted.elementwise:g} times for elementwise work "
        f"({1 / fitted.elementwise:.0%} of the memory bandwidth) and {fitted.links:g} times for exchanges "
        f"({1 / fitted.links:.0%} of the links). These factors were fitted on {fitted.source}. Apart from the "
        "published rates at the end of the page, they are the only figures that come from measurements.",
        "- **Overlap.** Not modelled: the kinds of work follow one another. The overlap of the fitted runs is part of "
        "the factors.",
        f"- **Latency.** Not modelled: an exchange takes its bytes over the bandwidth, even in {hops:,} hops. The cost "
        "of a delay is computed [below](#how-far-to-trust-it).",
        "- **Not included.** Loading data, evaluation, checkpoints, slow GPUs and failures.",
    ])  # fmt: skip


def _plan() -> Iterator[str]:
    low, high = factors().error
    tp = rows()["FSDP + TP"][0].planned
    yield (
        "The step time that `glassformer plan` reports, with its interval. Efficiency is tokens per second and GPU "
        f"relative to the same layout on {SIZES[0]} GPUs; memory is that of the fullest GPU. The interval "
        f"comes from the errors of the fit, {low:+.1%} to {high:+.1%}. No run with divided tensors was fitted, so for "
        f"FSDP + TP only the interval is known: {tp.low / tp.seconds:.2f} to "
        f"{tp.high / tp.seconds:.2f} times the figure shown. For example:"
    )
    nodes = f"--gpu {NODE} --nodes {SIZES[-1] // node()} --batch {SIZES[-1]}"
    yield f"```\nglassformer plan {MODEL} --train {nodes} --layout {LAYOUTS['FSDP'](SIZES[-1])}\n```"
    body = []
    for name, of in rows().items():
        shares = efficiencies([row.planned.seconds for row in of])
        for row, share in zip(of, shares, strict=True):
            step = row.planned
            body.append((
                name, f"{row.ranks:,}", f"{step.seconds:.3f}", f"{step.low:.2f} to {step.high:.2f}",
                f"{rate(row, step.seconds):,.0f}", f"{step.mfu:.1%}", f"{share:.1%}",
                f"{row.plan.memory['needed'] / 1e9:.1f}",
            ))  # fmt: skip
    heads = ("layout", "GPUs", "step, s", "interval, s", "tokens/s per GPU", "MFU", "efficiency", "memory, GB")
    yield table(heads, body, range(1, 8))
    yield (
        "Two things are missing from these times. The planner does not charge the hybrid layout for adding up "
        "gradients among replicas, so its times are a lower bound and its efficiency of 100% means nothing. And the "
        "planner assumes that gradients are reduced within a node before they leave it, which this project's trainer "
        "does not do."
    )


def _trainer() -> Iterator[str]:
    yield (
        "The trainer adds up gradients in a fixed order, so that a run gives the same bits in any layout "
        "([determinism](determinism.md)). Each GPU sends every other GPU its shard of the gradients in fp32, an "
        "all-to-all in place of a reduce-scatter. A GPU sends the same number of bytes either way, but with an "
        f"all-to-all nothing is reduced within the node first, so that {node()} times the bytes leave a node whose "
        f"{node()} GPUs belong to the group. Here computing takes the time planned above, and the exchanges are those "
        "that `planning/collectives.py` counts exactly, over the same links and with the same factor, although the "
        "factor was fitted on runs that do not exchange gradients in this way."
    )
    body = []
    for name, of in rows().items():
        shares = efficiencies([row.seconds for row in of])
        for row, share in zip(of, shares, strict=True):
            even = row.break_even
            body.append((
                name, f"{row.ranks:,}", f"{row.sent / 1e9:.1f}", f"{row.crossing / 1e9:.2f}",
                f"{row.exchanging():.3f}", f"{row.seconds:.3f}", f"{rate(row, row.seconds):,.0f}",
                f"{row.planned.mfu * row.planned.seconds / row.seconds:.1%}", f"{share:.1%}",
                "none" if even is None else f"{even / 1e9:.1f}", row.longest,
            ))  # fmt: skip
    heads = (
        "layout", "GPUs", "sent, GB", "leaving the node, GB", "exchanges, s", "step, s", "tokens/s per GPU", "MFU",
        "efficiency", "break-even link, GB/s", "longest exchange",
    )  # fmt: skip
    yield table(heads, body, range(1, 10))
    yield (
        "Bytes are those that one GPU sends in a step, and the part that leaves its node, averaged over the GPUs "
        "of the node. The break-even link is the bandwidth between nodes at which exchanges would take as long as "
        "computing: if it is above the "
        f"{cluster(NODE).machine.between / 1e9:.0f} GB/s assumed here, communication would be the larger part of a "
        "step; if it is below, overlap could in principle hide all of it."
    )


def _limits() -> Iterator[str]:
    fsdp, hybrid, tp = rows().values()
    between = cluster(NODE).machine.between / 1e9
    longest = {row.planned.bound for of in rows().values() for row in of}
    (work,) = longest
    most = max((row for of in rows().values() for row in of), key=lambda row: row.exchanging() / row.computing)
    crosses = [row for of in rows().values() for row in of if row.exchanging() > row.computing]
    told = (
        "In no row do exchanges take longer than computing: at this number of tokens per GPU they never cross up "
        f"to {SIZES[-1]:,} GPUs. The nearest is `{most.words}`, where exchanges take "
        f"{most.exchanging() / most.computing:.0%} of the time of computing."
        if not crosses
        else f"Exchanges take longer than computing in {len(crosses)} rows, the first being `{crosses[0].words}`."
    )
    yield (
        f"The longest kind of work in every row is matrix {work}, and computing takes "
        f"about {fsdp[-1].computing:.1f} s of a step in every one. {told}"
    )
    gathers = next((row for row in fsdp if row.exchanges[0].leaves), None)
    turns = f"up to {SIZES[SIZES.index(gathers.ranks) - 1]} GPUs" if gathers else "at every size"
    assert all(one.planned.seconds < other.seconds for one, other in zip(fsdp[1:], hybrid[1:], strict=True))
    ahead = [one.ranks for one, other in zip(fsdp, hybrid, strict=True) if one.seconds > other.seconds]
    yield "\n".join([
        f"- **FSDP.** The gathers of weights are limited by the links within a node {turns} and by those between "
        f"nodes beyond, which are nearly as fast: {node()} GPUs share {node() * between:.0f} GB/s. As planned, "
        f"exchanges grow from {fsdp[0].planned_exchanging:.3f} to {fsdp[-1].planned_exchanging:.3f} s. With the "
        f"trainer's all-to-all they grow to {fsdp[-1].exchanging():.2f} s, "
        f"{_part(fsdp[-1], 'sums of gradients'):.0%} of it for the sum of gradients. Most of the loss comes with the "
        f"first few nodes: the step takes {fsdp[2].seconds:.2f} s on {fsdp[2].ranks} GPUs and {fsdp[-1].seconds:.2f} "
        f"s on {fsdp[-1].ranks:,}, because the bytes that a GPU exchanges approach a constant. The "
        f"break-even link at {SIZES[-1]:,} GPUs is {_even(fsdp[-1]):.0f} GB/s. In return memory falls from "
        f"{_memory(fsdp[0]):.0f} to {_memory(fsdp[-1]):.0f} GB.",
        f"- **Hybrid.** The exchanges of FSDP stay within the node, and only the sums among replicas leave it, "
        f"{hybrid[-1].crossing / 1e9:.1f} GB per GPU in place of {fsdp[-1].crossing / 1e9:.1f}. It is predicted to be "
        f"faster than FSDP from {ahead[0]} GPUs on. The all-to-all decides this: if FSDP reduced gradients within the "
        f"node first, as the planner assumes, it would take {fsdp[-1].planned.seconds:.2f} s on {SIZES[-1]:,} GPUs "
        f"against {hybrid[-1].seconds:.2f} s, and would be ahead from two nodes on. The sums among replicas take place "
        "once a step however many micro-batches there are, so that their share falls with more sequences per GPU. "
        "Memory is the price of this layout: it does not fall with more GPUs.",
        f"- **FSDP + TP.** Each GPU holds half of every matrix while it computes, so half the bytes of weights and "
        f"gradients travel: {tp[-1].crossing / 1e9:.1f} GB leave the node. Sums of activations cost "
        f"{_spent(tp[-1], 'activations of TP'):.3f} s at any size, within the node. {_wider()}",
    ])  # fmt: skip


def _wider() -> str:
    """Returns the sentence that explains why two GPUs share a matrix and not a whole node."""
    ranks = SIZES[-1]
    shared = node()
    words = f"fsdp={ranks // shared},tp={shared},sp=1"
    whole, halves = planned(ranks, words), planned(ranks, f"{words},micro={shared // 2}")
    assert not whole.plan.fits and halves.plan.fits
    return (
        f"With all {shared} GPUs of a node (`tp={shared}`) {shared} sequences at once would need "
        f"{_memory(whole):.0f} GB, more than there is; in two micro-batches, which gather the weights twice as often, "
        f"a step on {ranks:,} GPUs would take {halves.seconds:.2f} s with the trainer's collectives."
    )


def _trust() -> Iterator[str]:
    counts = {name: sum(one.made.count for one in of[-1].exchanges) for name, of in rows().items()}
    costs = {name: counts[name] * LATENCY for name in counts}
    told = ", ".join(
        f"{counts[name]:,} collectives and {costs[name] / of[-1].seconds:.1%} of a step for {name}"
        for name, of in rows().items()
    )
    yield (
        f"**Latency** is what the prediction leaves out, and it grows with size. If each collective were delayed by "
        f"{LATENCY * 1e6:.0f} µs, that would add, at {SIZES[-1]:,} GPUs: {told}. An all-to-all among {SIZES[-1]:,} "
        "GPUs also splits a layer's gradients into "
        f"{_piece() / 1e6:.2f} MB for each of the others, and messages that small may not reach the full "
        "bandwidth."
    )
    one, many = itertools.islice(published.GROUPS[0](), 2)
    assert (one.number, many.number) == (1, 2)
    assert one.ours is not None and many.ours is not None
    yield (
        "**Published figures.** torchtitan reports "
        f"{one.published:,.0f} tokens/s per GPU for Llama 3.1 8B with FSDP on 8 H100 and {many.published:,.0f} on 128, "
        f"an efficiency of {many.published / one.published:.1%}; the planner predicts {many.ours / one.ours:.1%} for "
        "those runs, and rates up to "
        f"{max(point.ours / point.published for point in (one, many)) - 1:.0%} higher; their GPUs were held to 500 W, "
        "and what that does to the peak is not published. [Planning](planning.md#published-figures) lists "
        "these and many other runs next to the plan. No run of this project's trainer on GPUs is among them."
    )


def _piece() -> float:
    """Bytes of a layer's gradients for each rank of the largest group."""
    last = rows()["FSDP"][-1]
    layers = last.plan.config.n_layers
    return last.planned.work.again / 2 / layers * 4 / last.ranks


def _memory(row: Row) -> float:
    return row.plan.memory["needed"] / 1e9


def _spent(row: Row, name: str) -> float:
    return factors().links * sum(one.seconds() for one in row.exchanges if one.name == name)


def _part(row: Row, name: str) -> float:
    return _spent(row, name) / row.exchanging()


def _even(row: Row) -> float:
    return (row.break_even or 0.0) / 1e9


def drawing() -> str:
    """Returns an SVG file with two charts side by side, in the colours of a white page."""
    width, height = 560, 340
    ticks = [(float(size), f"{size:,}") for size in SIZES]
    highest = 1.1 * max(rate(row, row.planned.seconds) for of in rows().values() for row in of)
    charts = []
    for told, seconds in {
        "as planned": lambda row: row.planned.seconds, "with the trainer's collectives": lambda row: row.seconds,
    }.items():  # fmt: skip
        series = [
            Series(name, [(row.ranks, rate(row, seconds(row))) for row in of], style, dots=True)
            for style, (name, of) in enumerate(rows().items())
        ]
        y = Axis(f"Tokens/s per GPU, {told}", low=0.0, high=highest, decimals=0)
        charts.append(line_chart(series, Axis("GPUs", "log", ticks=ticks), y, f"{y.label}, by GPUs", width, height))
    label = "Predicted tokens per second and GPU from 8 to 1,024 GPUs, as planned and with the trainer's collectives"
    return panels(charts, label, width, height)


def main() -> None:
    FIGURE.write_text(drawing(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    print(page())


if __name__ == "__main__":
    main()
