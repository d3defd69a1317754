"""What a training step takes: the memory of the fullest rank, FLOPs, and on machines its time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from glassformer.config import MAX_CONTEXT, ModelConfig
from glassformer.errors import RequestError, check_whole
from glassformer.parallel.layout import Layout
from glassformer.planning.collectives import Collective, collectives
from glassformer.planning.machines import Cluster
from glassformer.planning.memory import MARGIN, LayoutMemory, Loss, TrainingMemory, outside
from glassformer.planning.time import RunTime, StepTime, Workload, step_time, workload
from glassformer.training.optimizers import OptimizerConfig


@dataclass(frozen=True)
class TrainingPlan:
    """A training step of `batch` sequences of `context` tokens over all ranks."""

    config: ModelConfig
    batch: int
    context: int
    dtype: torch.dtype
    optimizer: str
    layout: Layout
    moments: dict[str, TrainingMemory]
    """Of the fullest rank: "loss", "backward", "step", each where it holds most."""
    weights: torch.dtype = torch.float32
    """What weights are kept in; of adapters, what is frozen."""
    rank: int = 0
    """Of adapters, which alone are trained; 0: all weights are."""
    loss: Loss = "chunked"
    on: Cluster | None = None
    """The machines that it is planned on."""
    tokens: float | None = None
    """To train on."""

    @property
    def work(self) -> Workload:
        return workload(self.config, self.context, self.dtype, self.rank)

    @cached_property
    def time(self) -> StepTime | None:
        """Of a step, on the plan's machines; None without any."""
        return None if self.on is None else step_time(self.work, self.batch, self.layout, self.on)

    @property
    def run(self) -> RunTime | None:
        """Training on `tokens`; None without them, or without a machine."""
        return None if self.time is None or self.tokens is None else self.time.run(self.tokens)

    def placed(self, on: Cluster | None, tokens: float | None = None) -> TrainingPlan:
        """The same on these machines. Raises RequestError where the layout has more or fewer ranks than they are."""
        ranks = self.layout.ranks
        if on is not None and on.exact and on.count != ranks:
            raise RequestError(
                f"layout: {ranks} ranks on {on.count} accelerators; give a layout of {on.count}",
                code="conflict", field="layout", value=ranks, expected=f"{on.count} ranks",
            )  # fmt: skip
        return replace(self, on=on if on is None or on.exact else on.of(ranks), tokens=tokens)

    @property
    def fullest(self) -> str:
        """The moment that holds most."""
        return max(self.moments, key=lambda name: self.moments[name].total)

    @property
    def peak(self) -> TrainingMemory:
        return self.moments[self.fullest]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of the fullest rank at the moment that holds most, by what they are for; `total`, their sum; `margin`,
        what an allocator reserves beyond it; `reserved`, both; `outside`, what driver and links take of a machine
        besides; `needed`, all of it.

        Beyond the peak an allocator keeps fragments, a share of it, and where ranks share the gradients these too if
        they are not there at the peak: their pieces are too small for what is."""
        peak, pieces = self.peak, self.layout.zero >= 2 and self.layout.sharing > 1
        waiting = self.moments["step"].gradients - peak.gradients if pieces else 0
        margin = round(MARGIN * peak.total) + max(0, waiting)
        besides = 0 if self.on is None else outside(self.layout, self.on.machine.device)
        reserved = peak.total + margin
        return {
            **vars(peak), "total": peak.total, "margin": margin, "reserved": reserved,
            "outside": besides, "needed": reserved + besides,
        }  # fmt: skip

    @property
    def fits(self) -> bool:
        """On the plan's machine; without one, on any."""
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
        """Of a rank in a step."""
        return self.layout.microbatches(self.batch)

    @property
    def step_flops(self) -> float:
        """Of a step over all ranks, what is recomputed included; every query against all keys."""
        work, (products, scores, _) = self.work, self.work.repeats(self.recompute)
        repeated = products * work.again + scores * (work.model_flops - work.products) / 3
        return self.batch * self.context * (work.model_flops + repeated)

    @property
    def collectives(self) -> list[Collective]:
        """Operations between ranks in a step, where the layout is one that trains."""
        if self.rank or self.recompute != "none" or not self.layout.trains:
            return []
        device = "cpu" if self.on is None else self.on.machine.device
        return collectives(self.config, self.layout, self.batch, self.context, self.dtype, device)

    def to_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch, "context": self.context, "dtype": str(self.dtype).removeprefix("torch."),
            "weights": str(self.weights).removeprefix("torch."), "finetune": f"lora:{self.rank}" if self.rank else None,
            "optimizer": self.optimizer, "recompute": self.recompute, "layout": self.layout.model_dump(),
            "memory": self.memory, "fullest": self.fullest,
            "moments": {name: asdict(one) for name, one in self.moments.items()},
            "flops_per_token": self.work.model_flops, "step_flops": self.step_flops,
            "collectives": [asdict(one) for one in self.collectives],
            **({} if self.time is None else {"time": self.time.to_dict()}),
            **({} if self.run is None else {"run": self.run.to_dict()}),
        }  # fmt: skip


def check_workload(config: ModelConfig, batch: int, context: int) -> None:
    """Raises RequestError for a number of sequences, or a context, that the model cannot have."""
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
    """What a step takes. Raises RequestError for a context, layout or policy that cannot be.

    weights  what they are kept in; in bfloat16 with fp32 masters beside the optimizer's state
    device   whose kernels of attention count
    loss     what the loss holds of logits (`Loss`)
    rank     of adapters, which alone are trained (LoRA): in fp32, beside weights that stay in `dtype`"""
    layout = layout or Layout()
    check_workload(config, batch, context)
    layout.check(config, batch, context)
    weights = dtype if rank else weights
    ranks = LayoutMemory.of(config, batch, context, dtype, optimizer, layout, weights, device, loss, rank)
    moments = max(map(ranks.moments, range(layout.pp)), key=lambda of: max(one.total for one in of.values()))
    return TrainingPlan(config, batch, context, dtype, optimizer.kind, layout, moments, weights, rank, loss)
