"""What training takes on one rank: fp32 weights, products in another dtype by autocast, data in parallel.

In bytes, N parameters, W ranks (Rajbhandari et al. 2020, 1910.02054, with fp32 weights in place of master copies):

weights     4 N, from stage 3 on 4 N / W
gradients   4 N, from stage 2 on 4 N / W
optimizer   4 values, from stage 1 on over W; AdamW has 2 N values

They add up to more than the peak: the loss's logits are gone when most gradients arise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from glassformer.config import MAX_CONTEXT, ModelConfig
from glassformer.errors import RequestError, check_whole
from glassformer.parts.cost import Shape
from glassformer.parts.loss import working_bytes
from glassformer.planning.counts import Counts, Flops
from glassformer.planning.layout import Layout
from glassformer.planning.machines import Cluster
from glassformer.planning.time import Run, StepTime, step_time, workload
from glassformer.training.optimizers import OptimizerConfig

MARGIN = 0.06
"""What allocators reserve beyond what is used, as a share of it: 2 to 10 % where segments can grow."""
GATHERED = 2
"""Blocks whose weights are whole at a time from stage 3 on: the one at work and the one that is fetched ahead."""


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one rank, the fullest one, by what they are for.

    weights, gradients, optimizer   what the rank keeps of them
    activations                     kept for the backward pass, of all microbatches in flight
    recomputed                      a layer whose activations are made again
    loss                            embedding, head, and the logits that are held at once
    buffers                         weights gathered from other ranks
    margin                          what allocators reserve beyond what is used
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    recomputed: int
    loss: int
    buffers: int

    @property
    def margin(self) -> int:
        return round(MARGIN * self.used)

    @property
    def used(self) -> int:
        return sum(vars(self).values())

    @property
    def total(self) -> int:
        return self.used + self.margin

    def to_dict(self) -> dict[str, int]:
        return {**vars(self), "margin": self.margin, "total": self.total}


@dataclass(frozen=True)
class TrainingPlan:
    """A training step of `batch` sequences of `context` tokens over all ranks."""

    config: ModelConfig
    batch: int
    context: int
    dtype: torch.dtype
    optimizer: str
    layout: Layout
    rank: TrainingMemory
    flops: Flops
    """Of a token."""
    on: Cluster | None = None
    """The machines that it is planned on."""
    tokens: float | None = None
    """To train on."""

    @cached_property
    def time(self) -> StepTime | None:
        """Of a step, on the plan's machines; None without any."""
        if self.on is None:
            return None
        return step_time(workload(self.config, self.context, self.dtype), self.batch, self.layout, self.on)

    @property
    def run(self) -> Run | None:
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
    def memory(self) -> dict[str, int]:
        """Bytes of the fullest rank by what they are for, and `total`."""
        return self.rank.to_dict()

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
        """Of a step over all ranks, what is recomputed included."""
        again = self.flops.recomputed if self.recompute == "full" else 0.0
        return self.batch * self.context * (self.flops.training + again)

    def to_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch, "context": self.context, "dtype": str(self.dtype).removeprefix("torch."),
            "optimizer": self.optimizer, "recompute": self.recompute, "layout": self.layout.model_dump(),
            "memory": self.memory, "flops_per_token": self.flops.training, "step_flops": self.step_flops,
            **({} if self.time is None else {"time": self.time.to_dict()}),
            **({} if self.run is None else {"run": self.run.to_dict()}),
        }  # fmt: skip


def plan_training(
    config: ModelConfig,
    batch: int,
    context: int,
    dtype: torch.dtype,
    optimizer: OptimizerConfig,
    layout: Layout | None = None,
) -> TrainingPlan:
    """What a step takes. Raises RequestError for a context, layout or policy that cannot be."""
    layout = layout or Layout()
    check_whole("batch", batch)
    limit = config.embedding.limit(config.ctx)
    if not 1 <= context <= min(MAX_CONTEXT, limit or MAX_CONTEXT):
        most = min(MAX_CONTEXT, limit or MAX_CONTEXT)
        raise RequestError(
            code="range", field="context", value=context, expected=f"a number of tokens from 1 to {most:,}"
        )
    layout.check(config, batch, context)
    if layout.ranks > layout.dp:
        raise RequestError(
            "only dp is planned yet", code="conflict", field="layout", value=str(layout), expected="dp=N"
        )
    cost = config.costs(Shape.training(layout.microbatch(batch), context, torch.float32, dtype))
    ends = [cost[name] for name in cost.children if name != "layers"]
    n, layers = cost.parameters, list(cost["layers"].children.values())
    values = sum(optimizer.state_values(config.outline()).values())

    def over(size: int, stage: int) -> int:
        return -(-size // layout.dp) if layout.zero >= stage else size

    gathered = GATHERED * max(layer.parameters for layer in layers) + sum(end.parameters for end in ends)
    logits = working_bytes(layout.microbatch(batch) * context, config.vocab_size, dtype)
    memory = TrainingMemory(
        weights=over(4 * n, 3),
        gradients=over(4 * n, 2),
        optimizer=over(4 * values, 1),
        activations=cost["layers"].activation_bytes(layout.recompute),
        recomputed=max(layer.kept for layer in layers) if layout.recompute == "full" else 0,
        loss=sum(end.activation_bytes(layout.recompute) for end in ends) + logits,
        buffers=gathered * dtype.itemsize if layout.zero == 3 and layout.dp > 1 else 0,
    )
    return TrainingPlan(config, batch, context, dtype, optimizer.kind, layout, memory, Counts(config).flops(context))
