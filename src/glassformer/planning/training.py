"""What training takes on one rank: fp32 weights, products in another dtype by autocast, data in parallel.

In bytes, N parameters, W ranks (Rajbhandari et al. 2020, 1910.02054, with fp32 weights in place of master copies):

weights     4 N, from stage 3 on 4 N / W
gradients   4 N, from stage 2 on 4 N / W
optimizer   4 values, from stage 1 on over W; AdamW has 2 N values

They add up to more than the peak: the loss's logits are gone when most gradients arise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from glassformer.config import MAX_CONTEXT, ModelConfig
from glassformer.errors import RequestError, check_whole
from glassformer.parts.base import Value
from glassformer.parts.cost import Shape
from glassformer.parts.loss import working_bytes
from glassformer.planning.counts import Counts, Flops
from glassformer.training.optimizers import OptimizerConfig

MARGIN = 0.06
"""What allocators reserve beyond what is used, as a share of it: 2 to 10 % where segments can grow."""
GATHERED = 2
"""Blocks whose weights are whole at a time from stage 3 on: the one at work and the one that is fetched ahead."""


class Layout(Value):
    """How ranks share the work: `dp` of them, each with batch / dp sequences, and ZeRO's stage."""

    dp: int = 1
    zero: int = 0

    @classmethod
    def of(cls, text: str) -> Layout:
        """dp=8,zero=3. Raises RequestError for another word or number."""
        given: dict[str, int] = {}
        for word in filter(None, text.split(",")):
            name, _, number = word.partition("=")
            if name not in cls.model_fields or not number.isdecimal() or len(number) > 7:
                raise RequestError(code="unknown", field="layout", value=word, expected="dp=RANKS and zero=STAGE")
            given[name] = int(number)
        return cls(**given)

    def check(self, batch: int) -> None:
        """Raises RequestError where the ranks do not divide the batch, with the nearest number that does."""
        check_whole("dp", self.dp)
        if self.zero not in range(4):
            raise RequestError(code="range", field="zero", value=self.zero, expected="a stage from 0 to 3")
        if batch % self.dp:
            near = min((n for n in range(1, batch + 1) if batch % n == 0), key=lambda n: abs(n - self.dp))
            raise RequestError(
                f"dp={self.dp} does not divide the batch of {batch} sequences; dp={near} does",
                code="conflict", field="dp", value=self.dp, expected=f"a divisor of {batch}, such as {near}",
            )  # fmt: skip


@dataclass(frozen=True)
class TrainingPlan:
    """A training step of `batch` sequences of `context` tokens over all ranks."""

    config: ModelConfig
    batch: int
    context: int
    dtype: torch.dtype
    optimizer: str
    recompute: str
    layout: Layout
    memory: dict[str, int]
    """Bytes of one rank: weights, gradients, optimizer, activations, recomputed, loss, buffers, margin, and total."""
    flops: Flops
    """Of a token."""

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
        }  # fmt: skip


def plan_training(
    config: ModelConfig,
    batch: int,
    context: int,
    dtype: torch.dtype,
    optimizer: OptimizerConfig,
    recompute: str = "none",
    layout: Layout | None = None,
) -> TrainingPlan:
    """What a step takes. Raises RequestError for a context, layout or policy that cannot be."""
    layout = layout or Layout()
    check_whole("batch", batch)
    layout.check(batch)
    limit = config.embedding.limit(config.ctx)
    if not 1 <= context <= min(MAX_CONTEXT, limit or MAX_CONTEXT):
        most = min(MAX_CONTEXT, limit or MAX_CONTEXT)
        raise RequestError(
            code="range", field="context", value=context, expected=f"a number of tokens from 1 to {most:,}"
        )
    cost = config.costs(Shape.training(batch // layout.dp, context, torch.float32, dtype))
    ends = [cost[name] for name in cost.children if name != "layers"]
    n, layers = cost.parameters, list(cost["layers"].children.values())
    values = sum(optimizer.state_values(config.outline()).values())

    def over(size: int, stage: int) -> int:
        return -(-size // layout.dp) if layout.zero >= stage else size

    gathered = GATHERED * max(layer.parameters for layer in layers) + sum(end.parameters for end in ends)
    logits = working_bytes(batch // layout.dp * context, config.vocab_size, dtype)
    memory = {
        "weights": over(4 * n, 3),
        "gradients": over(4 * n, 2),
        "optimizer": over(4 * values, 1),
        "activations": cost["layers"].activation_bytes(recompute),
        "recomputed": max(layer.kept for layer in layers) if recompute == "full" else 0,
        "loss": sum(end.activation_bytes(recompute) for end in ends) + logits,
        "buffers": gathered * dtype.itemsize if layout.zero == 3 and layout.dp > 1 else 0,
    }
    memory["margin"] = round(MARGIN * sum(memory.values()))
    memory["total"] = sum(memory.values())
    return TrainingPlan(
        config, batch, context, dtype, optimizer.kind, recompute, layout, memory, Counts(config).flops(context)
    )
