"""Costs of a training step: memory of the fullest rank, FLOPs, and time on given machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from rich.console import RenderableType

from glassformer.config import MAX_CONTEXT, ModelConfig
from glassformer.errors import RequestError, check_whole
from glassformer.figures import days, seconds
from glassformer.figures.terminal import dim, size, unruled
from glassformer.parallel.layout import Layout
from glassformer.planning.advice import advice
from glassformer.planning.collectives import Collective, collectives
from glassformer.planning.machines import Cluster, money, span
from glassformer.planning.memory import MARGIN, LayoutMemory, Loss, TrainingMemory, outside
from glassformer.planning.planned import PrintedPlan, columns, page_of
from glassformer.planning.time import DAY, RunTime, StepTime, Workload, step_time, workload
from glassformer.report.plan_page import MOMENTS
from glassformer.training import Recipe
from glassformer.training.optimizers import OptimizerConfig


@dataclass(frozen=True)
class TrainingPlan(PrintedPlan):
    """Plan of a training step of `batch` sequences of `context` tokens over all ranks."""

    config: ModelConfig
    batch: int
    context: int
    dtype: torch.dtype
    optimizer: str
    layout: Layout
    moments: dict[str, TrainingMemory]
    """Memory of the fullest rank at "loss", "backward" and "step", each at its peak."""
    weights: torch.dtype = torch.float32
    """dtype of stored weights; with adapters, of the frozen weights."""
    rank: int = 0
    """Rank of the adapters, which are then the only trained weights; 0 if all weights are trained."""
    loss: Loss = "chunked"
    on: Cluster | None = None
    """Machines to plan for; None for memory only."""
    tokens: float | None = None
    """Tokens of the whole training run; None for a step only."""

    @property
    def work(self) -> Workload:
        return workload(self.config, self.context, self.dtype, self.rank)

    @cached_property
    def time(self) -> StepTime | None:
        """Time of a step on the plan's machines, assuming that it fits; None without machines."""
        return None if self.on is None else step_time(self.work, self.batch, self.layout, self.on)

    @property
    def run(self) -> RunTime | None:
        """Time, energy and cost of the whole training run on `tokens`; None without tokens, without a machine, or if
        the step does not fit."""
        return None if self.time is None or self.tokens is None or not self.fits else self.time.run(self.tokens)

    def placed(self, on: Cluster | None, tokens: float | None = None) -> TrainingPlan:
        """Returns a copy of this plan for these machines and this number of training tokens. Raises RequestError if the
        layout has more or fewer ranks than accelerators."""
        ranks = self.layout.ranks
        if on is not None and on.exact and on.count != ranks:
            raise RequestError(
                f"layout: {ranks} ranks on {on.count} accelerators; give a layout of {on.count}",
                code="conflict", field="layout", value=ranks, expected=f"{on.count} ranks",
            )  # fmt: skip
        return replace(self, on=on if on is None or on.exact else on.of(ranks), tokens=tokens)

    @property
    def fullest(self) -> str:
        """Name of the moment of a step ("loss", "backward" or "step") at which memory is largest."""
        return max(self.moments, key=lambda name: self.moments[name].total)

    @property
    def peak(self) -> TrainingMemory:
        return self.moments[self.fullest]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of the fullest rank at its fullest moment, by purpose; `total`, their sum; `margin`, extra that the
        allocator reserves; `reserved`, both; `outside`, memory of the driver and of links; `needed`, all of it.

        `margin` is for fragments, a share of the peak, and with sharded gradients also for gradients of the optimizer's
        step that do not exist at the peak, because the blocks that other tensors free are too small for gradients."""
        peak, pieces = self.peak, self.layout.zero >= 2 and self.layout.sharing > 1
        waiting = self.moments["step"].gradients - peak.gradients if pieces else 0
        margin = round(MARGIN * peak.total) + max(0, waiting)
        device = "cpu" if self.on is None else self.on.machine.device
        process = self.on is not None or self.layout.ranks == 1
        besides = outside(self.layout, device, self.moments.values()) if process else 0
        reserved = peak.total + margin
        return {
            **vars(peak), "total": peak.total, "margin": margin, "reserved": reserved,
            "outside": besides, "needed": reserved + besides,
        }  # fmt: skip

    @property
    def fits(self) -> bool:
        """True if the step fits the memory of the plan's machine; without a machine, always True."""
        return self.on is None or self.memory["needed"] <= self.on.machine.memory

    @property
    def recompute(self) -> str:
        return self.layout.recompute

    @property
    def microbatch(self) -> int:
        """Sequences that a rank computes at once."""
        return self.layout.microbatch(self.batch)

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a rank in a step."""
        return self.layout.microbatches(self.batch)

    @property
    def step_flops(self) -> float:
        """FLOPs of a step over all ranks, recomputation included; every query against all keys."""
        work, (products, scores, _) = self.work, self.work.repeats(self.recompute)
        repeated = products * work.again + scores * (work.model_flops - work.products) / 3
        return self.batch * self.context * (work.model_flops + repeated)

    @property
    def collectives(self) -> list[Collective]:
        """Communication operations between ranks in a step; empty for adapters, with recomputation, and for a layout
        that the trainer does not support."""
        if self.rank or self.recompute != "none" or not self.layout.trains:
            return []
        device = "cpu" if self.on is None else self.on.machine.device
        return collectives(self.config, self.layout, self.batch, self.context, self.dtype, device)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "batch": self.batch, "context": self.context, "dtype": str(self.dtype).removeprefix("torch."),
            "weights": str(self.weights).removeprefix("torch."), "finetune": f"lora:{self.rank}" if self.rank else None,
            "optimizer": self.optimizer, "recompute": self.recompute, "layout": self.layout.model_dump(),
            "memory": self.memory, "fullest": self.fullest,
            "moments": {name: asdict(one) for name, one in self.moments.items()},
            "flops_per_token": self.work.model_flops, "step_flops": self.step_flops,
            "collectives": [asdict(one) for one in self.collectives],
            **({} if self.on is None else {"fits": self.fits}),
            **({} if self.time is None or not self.fits else {"time": self.time.to_dict()}),
            **({} if self.run is None else {"run": self.run.to_dict()}),
        }  # fmt: skip

    def fits_with(self, layout: Layout) -> bool:
        """Returns True if this training step fits the plan's machines with `layout` in place of the plan's layout."""
        assert self.on is not None
        optimizer = Recipe.of(tokens=1, optimizer=self.optimizer).optimizer
        other = plan_training(
            self.config, self.batch, self.context, self.dtype, optimizer, layout, self.weights,
            self.on.machine.device, self.loss, self.rank,
        )  # fmt: skip
        return other.placed(self.on).fits

    def page(self) -> dict[str, Any]:
        return page_of(self.config, self.on, self.name, self.to_dict())

    def beside(self, *others: TrainingPlan) -> Iterator[str | RenderableType]:
        plans = (self, *others)
        table = columns("bytes of a rank", plans)
        table.add_row("fullest moment", *(MOMENTS[one.fullest] for one in plans))
        for what in self.memory:
            if any(one.memory[what] for one in plans) and (self.on is not None or what not in ("outside", "needed")):
                table.add_row(MEMORY.get(what, what), *(size(one.memory[what]) for one in plans))
        if self.on is None and all(one.layout.ranks == 1 for one in plans):
            table.add_row("process on a CPU", *(size(one.memory["needed"]) for one in plans))
        table.add_row("FLOPs of a step", *(f"{one.step_flops:.4g}" for one in plans))
        if self.on is not None:
            has = self.on.machine.memory
            shares = [one.memory["needed"] / has for one in plans]
            table.add_row(f"of {size(has)}", *(f"{share:.0%}{', does not fit' * (share > 1)}" for share in shares))
        steps = [one.time if one.fits else None for one in plans]
        for what, of_step in STEP.items() if any(steps) else ():
            if what != HFU or any(one.recompute != "none" for one in plans):
                table.add_row(what, *("" if step is None else of_step(step) for step in steps))
        runs = [one.run for one in plans]
        for what, of_run in RUN.items() if any(runs) else ():
            table.add_row(what, *("" if run is None else of_run(run) for run in runs))
        yield table
        yield dim(self.conditions)
        if self.on is not None:
            yield dim(self.on.priced)
            if any(step is not None and not step.measured for step in steps):
                why = f"no training run of {self.on.machine.title} with such a layout has been fitted"
                yield dim(f"{why}: times are a range")
        for one in plans:
            yield from one.advised()
        for one in plans:
            if one.explain:
                yield from one.explained()
        if any(steps) and not any(runs):
            yield dim("add --tokens N for days and cost")

    @property
    def conditions(self) -> str:
        """Text of the plan's assumptions: dtypes, optimizer and layout of the step."""
        kept = f"weights in {str(self.weights).removeprefix('torch.')}"
        kept += f" and frozen, adapters of rank {self.rank} in float32" if self.rank else ""
        products = str(self.dtype).removeprefix("torch.")
        layout = self.layout
        kinds = {"data": layout.dp, "tensor": layout.tp, "pipeline": layout.pp, "context": layout.cp}
        split = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count > 1)
        shared = f" ({split})" if layout.ranks > layout.dp else ""
        ranks = f"{layout.ranks} ranks{shared}, ZeRO stage {layout.zero}" if layout.ranks > 1 else "one rank"
        sequences = f"{self.batch} sequences in all" if self.batch > 1 else "one sequence"
        step = f"{kept}, products in {products}, {self.optimizer}, recompute {self.recompute}"
        return f"{step}; {ranks}, {sequences}"

    def advised(self) -> Iterator[str]:
        """Yields one line with the changes of layout and machine that would save most; if the step does not fit, the
        first of a few changes with which it does. Yields nothing without a machine."""
        if not self.fits:
            yield self.remedy
            return
        found = advice(self)
        layouts = [change for change in found if change.layout is not None][:1]
        machines = [change for change in found if change.layout is None][:1]
        saving = [f"{change.words} saves {change.saves:.0%} of a step" for change in (*layouts, *machines)]
        if saving:
            yield f"{self.name or 'this step'}: {'; '.join(saving)}"

    @property
    def remedy(self) -> str:
        """Sentence on a step that does not fit: the reason why no time is given, and a change that makes it fit."""
        lean = self.layout.replace(micro=1)
        no_time = f"{self.name or 'this step'} does not fit, so no time of it is planned"
        for layout in (lean, lean.replace(recompute="full")):
            if layout != self.layout and self.fits_with(layout):
                return f"{no_time}; --layout {layout} does"
        return f"{no_time}; --find searches layouts that do"

    def explained(self) -> Iterator[RenderableType]:
        """Yields every value with its formula: memory at each moment, time by kind of work, collectives."""
        table = unruled(self.name)
        table.add_column("bytes of a rank")
        for moment in self.moments:
            table.add_column(MOMENTS[moment], justify="right")
        for what in (field.name for field in fields(TrainingMemory)):
            values = [getattr(memory, what) for memory in self.moments.values()]
            if any(values):
                table.add_row(what, *(size(value) if value else "" for value in values))
        table.add_row("total", *(size(memory.total) for memory in self.moments.values()), style="bold")
        yield table
        if self.time is not None and self.fits:
            table = unruled(self.name)
            for head in ("time of a step", "share", "roofline", "planned", "made of"):
                left = head in ("time of a step", "made of")
                table.add_column(head, justify="left" if left else "right", overflow="fold")
            for kind in sorted(self.time.kinds, key=lambda kind: -kind.seconds):
                rate = f"{kind.amount:.4g} {kind.unit} / {kind.rate:.4g} {kind.unit}/s"
                table.add_row(
                    kind.kind, f"{kind.seconds / self.time.seconds:.1%}", seconds(kind.roof),
                    seconds(kind.seconds), f"{kind.formula}\n= {rate if kind.unit else f'{kind.amount:.3g}'}",
                )  # fmt: skip
            yield table
        if self.collectives:
            table = unruled(self.name)
            for head in ("between ranks of", "operation", "a step", "bytes"):
                table.add_column(head, justify="right" if head in ("a step", "bytes") else "left")
            for each in self.collectives:
                table.add_row(each.axis, each.operation, f"{each.count:,}", size(each.bytes))
            yield table


MEMORY = {
    "margin": "allocator's margin", "reserved": "with the margin", "outside": "driver and NCCL",
    "needed": "needed in all",
}  # fmt: skip
"""Labels of the entries of `TrainingPlan.memory` whose names do not explain them."""
HFU = "HFU, with recomputation"
STEP: dict[str, Callable[[StepTime], str]] = {
    "time of a step": lambda one: _likely(one),
    "tokens a second": lambda one: (
        f"{one.tokens_per_second:,.0f}"
        if one.measured
        else span(one.tokens / one.high, one.tokens / one.low, "{:,.0f}".format)
    ),
    "MFU": lambda one: _share(one, one.mfu),
    HFU: lambda one: _share(one, one.hfu),
    "most time in": lambda one: one.bound,
}
RUN: dict[str, Callable[[RunTime], str]] = {
    "days": lambda one: span(one.low / DAY, one.high / DAY, days),
    "accelerator hours": lambda one: span(
        one.hours * one.low / one.seconds, one.hours * one.high / one.seconds, "{:,.0f}".format
    ),
    "energy, at most": lambda one: f"{one.energy * one.high / one.seconds:,.0f} kWh",
    "cost": lambda one: money(one.cost()),
}


def _likely(step: StepTime) -> str:
    """Formats the estimated seconds of a step with their interval, or only the interval if the machine was not
    measured."""
    between = span(step.low, step.high, seconds)
    return f"{seconds(step.seconds)}, {between}" if step.measured else between


def _share(step: StepTime, of_peak: float) -> str:
    """Formats `of_peak`, a share of the peak FLOP/s, or the interval of that share if the machine was not measured."""
    if step.measured:
        return f"{of_peak:.1%}"
    return span(of_peak * step.seconds / step.high, of_peak * step.seconds / step.low, "{:.1%}".format)


def check_workload(config: ModelConfig, batch: int, context: int) -> None:
    """Raises RequestError if the number of sequences or the context is impossible for the model."""
    check_whole("batch", batch)
    check_whole("context", context)
    limit = config.embedding.limit(config.ctx)
    most = min(MAX_CONTEXT, limit or MAX_CONTEXT)
    if context > most:
        told = f" is past this model's learned positions, which end at {limit}" if limit else ""
        expected = f"a number of tokens from 1 to {most:,}"
        message = f"context={context}{told}" if limit else f"context={context}: give {expected}"
        raise RequestError(message, code="range", field="context", value=context, expected=expected)


def plan_training(
    config: ModelConfig,
    batch: int,
    context: int,
    dtype: torch.dtype,
    optimizer: OptimizerConfig,
    layout: Layout | None = None,
    weights: torch.dtype = torch.float32,
    device: str = "cpu",
    loss: Loss = "chunked",
    rank: int = 0,
) -> TrainingPlan:
    """Returns the plan of a training step. Raises RequestError for an impossible context, layout or policy.

    weights  dtype of stored weights; bfloat16 has fp32 masters in addition to the optimizer's state
    device   type of device whose attention kernels are used
    loss     materialisation of logits (`Loss`)
    rank     rank of adapters, the only trained weights (LoRA): in fp32, next to frozen weights in `dtype`"""
    layout = layout or Layout()
    check_workload(config, batch, context)
    layout.check(config, batch, context)
    weights = dtype if rank else weights
    ranks = LayoutMemory.of(config, batch, context, dtype, optimizer, layout, weights, device, loss, rank)
    moments = max(map(ranks.moments, range(layout.pp)), key=lambda of: max(one.total for one in of.values()))
    return TrainingPlan(config, batch, context, dtype, optimizer.kind, layout, moments, weights, rank, loss)
