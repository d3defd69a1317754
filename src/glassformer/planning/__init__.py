"""What a model costs, before it is built: exact counts from its config alone, nothing allocated.

>>> cost = gf.plan(gf.preset("llama-2-70b"), batch=8)
>>> cost.weight_bytes, cost.state_bytes
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glassformer.config import MAX_CONTEXT, ModelConfig
from glassformer.errors import RequestError
from glassformer.parts.cost import Shape


@dataclass(frozen=True)
class Plan:
    """Generation with weights in `dtype` and states in `state_dtype`, of `batch` sequences of `context` tokens."""

    context: int
    batch: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    parameters: int
    """Tied ones once."""
    active_parameters: int
    """Those that one token meets: of experts, the chosen ones alone."""
    weight_bytes: int
    state_bytes: int
    """Of one sequence: exactly what `model.init_state(1, context, state_dtype)` allocates."""
    next_token_bytes: int
    """By how much the state grows with a token after `context`: 0 where windows and recurrences hold all there is."""
    read_parameters: int
    """Those that the step of one token reads: of experts the chosen ones, of embeddings the head's matrix alone."""
    flops: float
    """Forward FLOPs of matrix products per token, as `config.flops` counts them at this context."""

    @property
    def state_bytes_per_token(self) -> float:
        return self.state_bytes / self.context

    @property
    def bytes(self) -> int:
        """Weights and the states of the batch."""
        return self.weight_bytes + self.batch * self.state_bytes

    @property
    def bytes_read(self) -> int:
        """What a step reads at least that writes a token to each sequence: weights once, and every state. Over the
        memory's bandwidth it is the shortest time that a step can take. (Of experts, a batch meets more than one token
        does, up to all.)"""
        return self.read_parameters * self.dtype.itemsize + self.batch * self.state_bytes


def plan(
    config: ModelConfig,
    *,
    context: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype | None = None,
) -> Plan:
    """What generating with this model takes. `context`: tokens of a sequence, by default all the model is trained to
    read; `state_dtype`: by default that of the weights.

    Raises RequestError for a context that the model cannot have."""
    context = config.context if context is None else context
    state_dtype = dtype if state_dtype is None else state_dtype
    if not 1 <= context <= MAX_CONTEXT:
        raise RequestError(f"context={context}: give a number of tokens from 1 to {MAX_CONTEXT:,}")
    if batch < 1:
        raise RequestError(f"batch={batch}: give a number of sequences from 1 up")
    limit = config.embedding.limit(config.ctx)
    if limit is not None and context > limit:
        raise RequestError(f"context={context} is past this model's learned positions, which end at {limit}")
    cost = config.costs(Shape(1, 1, context, "decode", dtype, state_dtype=state_dtype))
    idle = sum(cost[name].active_parameters for name in ("embedding", "head"))
    return Plan(
        context=context,
        batch=batch,
        dtype=dtype,
        state_dtype=state_dtype,
        parameters=cost.parameters,
        active_parameters=cost.active_parameters,
        read_parameters=cost.active_parameters - idle + config.vocab_size * config.d_model,
        weight_bytes=cost.parameters * dtype.itemsize,
        state_bytes=cost.state_bytes,
        next_token_bytes=config.state_bytes(context + 1, state_dtype) - cost.state_bytes,
        flops=float(cost.flops),
    )
