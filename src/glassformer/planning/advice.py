"""Changes of the layout, if memory allows, and of the machine that would shorten a training step most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.parallel.layout import POLICIES, Layout
from glassformer.planning.machines import Cluster
from glassformer.planning.time import StepTime, Workload, step_time

FASTER = {
    "products twice as fast": lambda machine: {"peak": {name: 2 * rate for name, rate in machine.peak.items()}},
    "memory twice as fast": lambda machine: {"bandwidth": 2 * machine.bandwidth},
    "links twice as fast": lambda machine: {"inside": 2 * machine.inside, "between": 2 * machine.between},
}
"""Name of a hypothetical faster machine -> function from a Machine to the fields to replace; the gain shows the
bottleneck."""


LEAST = 0.005
"""Smallest share of a step's time that a change must save to be listed."""


class StepPlan(Protocol):
    """Interface of a plan of a training step, as far as `advice` reads it."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def batch(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def on(self) -> Cluster | None: ...
    @property
    def work(self) -> Workload: ...
    @property
    def time(self) -> StepTime | None: ...
    def fits_with(self, layout: Layout) -> bool: ...


@dataclass(frozen=True)
class Change:
    """A change of layout or machine, with the share of a step's time that it saves."""

    words: str
    saves: float
    layout: Layout | None = None
    """The changed layout; None for a change of the machine."""


def advice(plan: StepPlan) -> tuple[Change, ...]:
    """Returns the changes that would shorten a plan's training step: of the layouts that divide and fit, the one that
    saves most time, and every change of the machine, largest saving first."""
    if plan.on is None or plan.time is None:
        return ()
    best = next(_fitting(plan, _layouts(plan, plan.on)), None)
    found = [*([best] if best else []), *_machines(plan, plan.on)]
    return tuple(sorted((one for one in found if one.saves > LEAST), key=lambda one: -one.saves))


def _layouts(plan: StepPlan, on: Cluster) -> list[Change]:
    """Returns a `Change` for each layout that differs from the plan's in one setting and divides the model and the
    batch, fastest first; memory is not checked."""
    assert plan.time is not None
    found = []
    for words, layout in _neighbours(plan.layout, plan.microbatch):
        try:
            layout.check(plan.config, plan.batch, plan.context)
        except RequestError:
            continue
        step = step_time(plan.work, plan.batch, layout, on)
        found.append(Change(words, 1 - step.seconds / plan.time.seconds, layout))
    return sorted(found, key=lambda one: -one.saves)


def _fitting(plan: StepPlan, found: list[Change]) -> Iterator[Change]:
    """Yields the changes whose layout fits the memory of the machines, lazily, because planning memory takes longer
    than planning time."""
    for change in found:
        if change.saves > LEAST and change.layout is not None and plan.fits_with(change.layout):
            yield change


def _neighbours(layout: Layout, micro: int) -> Iterator[tuple[str, Layout]]:
    """Yields (setting that differs, as text, and the layout) for each layout that differs from `layout` in one setting
    and has an equal number of ranks. `micro`: sequences of a microbatch."""
    for policy in POLICIES[: POLICIES.index(layout.recompute)]:
        yield f"recompute={policy}", layout.replace(recompute=policy)
    for other in {2 * micro, micro // 2} - {0}:
        yield f"micro={other}", layout.replace(micro=other)
    if layout.interleave == 1 < layout.pp:
        yield "interleave=2", layout.replace(interleave=2)
    for stage in range(layout.zero):
        yield f"zero={stage}", layout.replace(zero=stage)
    for name in ("tp", "pp", "cp"):
        size = getattr(layout, name)
        if size % 2 == 0:
            sp = {"sp": False} if name == "tp" and size == 2 else {}
            fewer = layout.replace(dp=2 * layout.dp, **{name: size // 2}, **sp)
            yield f"{name}={size // 2},dp={fewer.dp}", fewer


def _machines(plan: StepPlan, on: Cluster) -> Iterator[Change]:
    assert plan.time is not None
    for words, change in FASTER.items():
        faster = replace(on, machine=on.machine.replace(**change(on.machine)))
        yield Change(words, 1 - step_time(plan.work, plan.batch, plan.layout, faster).seconds / plan.time.seconds)
