"""Search for layouts of a training step that fit a cluster, fastest first, with the reasons why others do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from rich.console import RenderableType

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.figures import seconds
from glassformer.figures.terminal import Tabular, dim, size, unruled
from glassformer.parallel.layout import Layout
from glassformer.planning.machines import Cluster
from glassformer.planning.memory import FP32, MARGIN, outside
from glassformer.planning.planned import PrintedPlan
from glassformer.planning.ranks import RankWeights, share
from glassformer.planning.time import step_time, workload
from glassformer.planning.training import RUN, TrainingPlan, plan_training
from glassformer.training.optimizers import OptimizerConfig

FOUND = 5
"""Largest number of layouts that are shown."""
TRIED = 60
"""Number of layouts whose memory is planned: the ones with the shortest estimated time."""
POLICIES = ("none", "selective", "full")
MOST_RANKS = 1 << 16
LONG = 1 << 15
"""Smallest context, in tokens, for which the search also divides sequences among ranks (cp)."""


@dataclass(frozen=True)
class TooLarge:
    """A layout that needs too much memory but is faster than those that fit, with the bytes that it needs."""

    layout: Layout
    seconds: float
    needed: int
    reason: str


@dataclass(frozen=True)
class Smallest:
    """Smallest sufficient cluster: fewest accelerators, in nodes of the size of the requested cluster."""

    ranks: int
    node: int
    batch: int
    """The requested batch, or a larger one if no layout of `ranks` accelerators that fits divides the requested one."""
    layout: Layout


@dataclass(frozen=True)
class Search(PrintedPlan, Tabular):
    """Result of a search: plans that fit, fastest first; if no plan fits, the fewest accelerators that would
    suffice."""

    on: Cluster
    batch: int
    fitting: tuple[TrainingPlan, ...]
    too_large: tuple[TooLarge, ...]
    tried: int
    possible: int
    exhausted: bool
    """True if every layout was planned. If False and no plan fits, an untried layout may fit."""
    smallest: Smallest | None = None

    @property
    def best(self) -> TrainingPlan | None:
        """The fastest plan that fits; None if no plan fits."""
        return self.fitting[0] if self.fitting else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "machine": self.on.name, "ranks": self.on.count, "batch": self.batch,
            "possible": self.possible, "tried": self.tried, "exhausted": self.exhausted,
            "fitting": [one.to_dict() for one in self.fitting],
            "too_large": [{**vars(one), "layout": one.layout.model_dump()} for one in self.too_large],
            "smallest": None if self.smallest is None else {
                **vars(self.smallest), "layout": self.smallest.layout.model_dump()
            },
        }  # fmt: skip

    def records(self) -> list[dict[str, Any]]:
        """Returns a row for each layout that fits, fastest first."""
        return [
            {**one.layout.model_dump(), "seconds": one.time.seconds, "needed": one.memory["needed"]}
            for one in self.fitting
            if one.time is not None
        ]

    def page(self) -> dict[str, Any]:
        """Returns the page of the fastest plan. Raises RequestError if no layout fits."""
        if self.best is None:
            message = f"{self.name} fits no layout that was tried: no page of it can be written; leave out --out"
            raise RequestError(message, code="conflict", field="out")
        return self.best.page()

    def beside(self, *others: Search) -> Iterator[str | RenderableType]:
        for one in (self, *others):
            yield from one.found()

    def found(self) -> Iterator[str | RenderableType]:
        """Yields the text of a successful search: the layouts that fit, fastest first, the faster ones that do not fit,
        and details of the fastest."""
        has = self.on.machine.memory
        table = unruled(self.name)
        for head in ("layout", "a step", "tokens a second", "needed", f"of {size(has)}"):
            table.add_column(head, justify="left" if head == "layout" else "right", overflow="fold")
        for one in self.fitting:
            if (step := one.time) is not None:
                memory = one.memory["needed"]
                rate = f"{step.tokens_per_second:,.0f}"
                table.add_row(str(one.layout), seconds(step.seconds), rate, size(memory), f"{memory / has:.0%}")
        if self.fitting:
            yield table
        for large in self.too_large[:3]:
            refused = f"{large.layout} would take {seconds(large.seconds)} and does not fit: {size(large.needed)}"
            yield dim(f"{refused}, {large.reason}")
        if not self.fitting:
            yield self.refused
        few = ": too small for a copy of the model on each; --batch gives a larger one"
        tried = f"{self.possible:,} layouts of a batch of {self.batch:,}, the memory of {self.tried} planned"
        yield dim(tried + (few if self.batch < self.on.count else ""))
        if self.best is not None and (run := self.best.run) is not None:
            yield from (f"{what}: {of(run)}" for what, of in RUN.items())
        if self.best is not None and self.explain:
            yield from self.best.explained()

    @property
    def refused(self) -> str:
        """Sentence that gives the reason why no layout fits, and the smallest cluster on which one would."""
        tried = "no layout" if self.exhausted else f"none of the {self.tried} layouts tried"
        words = f"{self.name} fits {tried} of {self.on.count} {self.on.name} with a batch of {self.batch:,}"
        if (smallest := self.smallest) is None:
            return f"{words}, nor the leanest of any larger number"
        larger = f" with a batch of {smallest.batch:,}" if smallest.batch != self.batch else ""
        return f"{words}; {smallest.ranks} in nodes of {smallest.node} would do{larger}: {smallest.layout}"


def find_layouts(
    config: ModelConfig,
    batch: int,
    context: int,
    dtype: torch.dtype,
    optimizer: OptimizerConfig,
    on: Cluster,
    most: int = TRIED,
) -> Search:
    """Searches the layouts of all accelerators of `on` for a batch over all ranks, planning the memory of about `most`
    of them, in order of estimated time.

    Raises RequestError if the context is impossible, or no layout divides the batch."""
    possible = list(layouts(config, batch, context, on))
    work = workload(config, context, dtype)
    if not possible:
        more = -(-batch // on.count) * on.count
        raise RequestError(
            f"no layout of {on.count} accelerators divides batch={batch}; give batch={more} (--batch {more})",
            code="conflict", field="batch", value=batch, expected=f"a multiple of {on.count}",
        )  # fmt: skip
    timed = {layout: step_time(work, batch, layout, on).seconds for layout in possible}
    fitting: dict[Layout, TrainingPlan] = {}
    too_large: dict[Layout, TooLarge] = {}
    refused: dict[Layout, TooLarge] = {}
    hopeless: set[Layout] = set()
    """Layouts that do not fit even without gradients."""
    tried, exhausted = 0, True

    def planned(layout: Layout) -> TrainingPlan | None:
        """Returns the plan of a layout; None if it does not fit, or a mixer cannot be divided this way."""
        nonlocal tried
        tried += 1
        try:
            plan = plan_training(config, batch, context, dtype, optimizer, layout, device=on.machine.device).placed(on)
        except RequestError:
            return None
        if plan.fits:
            return plan
        largest = max(vars(plan.peak).items(), key=lambda item: item[1])[0]
        refused[layout] = TooLarge(layout, timed[layout], plan.memory["needed"], f"{largest} are most of it")
        if plan.memory["needed"] - plan.memory["margin"] - plan.peak.gradients > on.machine.memory:
            hopeless.add(layout)
        return None

    for layout in sorted(possible, key=timed.__getitem__):
        # among layouts that differ only in micro and recompute, the first that fits is the fastest
        alike = layout.replace(micro=None, recompute="none")
        if alike in fitting or alike in too_large:
            continue
        if len(fitting) == FOUND or tried >= most:
            exhausted = False
            break
        states = states_of(config, layout, optimizer, on)
        if states > on.machine.memory:
            too_large[alike] = TooLarge(
                layout, timed[layout], states, "weights, gradients and states together are more"
            )
            continue
        least = layout.replace(micro=1)
        alone = layout.microbatches(batch) <= layout.pp  # activations may peak before any gradient exists
        if layout in refused or (least in refused and (least in hopeless or not alone)):
            continue  # because even a microbatch of one sequence was too large
        if (plan := planned(layout)) is not None:
            fitting[alike] = plan
        elif layout != least:
            planned(least)
    smallest = None
    if not fitting:
        smallest = smallest_cluster(config, batch, context, dtype, optimizer, on, on.count * (2 if exhausted else 1))
        if smallest is not None and smallest.ranks == on.count and smallest.batch == batch:
            plan = plan_training(config, batch, context, dtype, optimizer, smallest.layout, device=on.machine.device)
            fitting[smallest.layout], smallest = plan.placed(on), None
    larger = sorted([*too_large.values(), *refused.values()], key=lambda one: one.seconds)
    return Search(on, batch, tuple(fitting.values()), tuple(larger), tried, len(possible), exhausted, smallest)


def layouts(config: ModelConfig, batch: int, context: int, on: Cluster) -> Iterator[Layout]:
    """Yields the layouts of all accelerators that divide the model and the batch: tensor parallel within a node, powers
    of two."""
    for tp, pp, cp in product(_powers(on.node), _powers(min(on.count, config.n_layers)), _powers(on.count)):
        if on.count % (tp * pp * cp) or (cp > 1 and context < LONG) or (cp > 1 and pp > 1):
            continue
        dp = on.count // (tp * pp * cp)
        if batch % dp:
            continue
        rows, sharing = batch // dp, dp * cp
        for ep, micro in product(_powers(dp), _powers(rows)):
            base = Layout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, sp=tp > 1, micro=micro)
            try:
                base.check(config, batch, context)
            except RequestError:
                continue
            for zero, policy in product((0,) if sharing == 1 else (1, 3), POLICIES):
                yield base.replace(zero=zero, recompute=policy)


def states_of(config: ModelConfig, layout: Layout, optimizer: OptimizerConfig, on: Cluster) -> int:
    """Returns the least bytes that a rank needs, for a quick check: those at the optimizer's step, without activations.
    Counted are weights, optimizer state, complete gradients, the allocator's margin and the memory outside it."""
    of_rank = share(config, layout, optimizer)
    whole: RankWeights = sum(of_rank.layers, of_rank.first + of_rank.last)
    each = [1.0 if layout.zero < 3 else whole.divided, 1.0 if layout.zero < 2 else whole.divided]
    state = FP32 * whole.state * (whole.divided if layout.zero else 1.0)
    held = (FP32 * whole.values * sum(each) + state) / layout.pp
    return round(held * (1 + MARGIN)) + outside(layout, on.machine.device)


def smallest_cluster(
    config: ModelConfig,
    batch: int,
    context: int,
    dtype: torch.dtype,
    optimizer: OptimizerConfig,
    on: Cluster,
    least: int,
) -> Smallest | None:
    """Returns the smallest cluster, doubling from `least` accelerators, on which a layout with the least memory (full
    recomputation, microbatches of one sequence) fits; None if one sequence is too long for any cluster."""
    count = least
    while count <= MOST_RANKS:
        larger = replace(on, count=count) if on.exact else replace(on.of(count), exact=True)
        # replicas: one, the number that the most stages leave, and all ranks
        copies = (1, count // _powers(min(count, config.n_layers))[-1], count)
        for rows in dict.fromkeys(dp * -(-batch // dp) for dp in copies):
            lean = [
                layout
                for layout in layouts(config, rows, context, larger)
                if layout.recompute == "full" and layout.microbatch(rows) == 1 and layout.zero in (0, 3)
            ]
            lean = [one for one in lean if states_of(config, one, optimizer, on) <= on.machine.memory]
            for layout in sorted(lean, key=lambda one: (one.pp, one.ep, one.tp)):
                try:
                    plan = plan_training(config, rows, context, dtype, optimizer, layout, device=on.machine.device)
                except RequestError:
                    continue
                if plan.placed(larger).fits:
                    return Smallest(count, larger.node, rows, layout)
        count *= 2
    return None


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]
