"""Plans of a model: what generating with it or training it takes, and the layouts that fit a machine."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch

from glassformer.config import MAX_CONTEXT, ModelConfig
from glassformer.errors import RequestError
from glassformer.machine import dtype_of
from glassformer.naming.resolve import ModelLike, resolve
from glassformer.parallel.layout import RANKS, Layout
from glassformer.parts.core.cost import Shape
from glassformer.planning.counts import Component, Counts, Flops
from glassformer.planning.decoding import Decoding
from glassformer.planning.machines import Cluster, Price, cluster
from glassformer.planning.memory import LOSSES, Loss
from glassformer.planning.search import Search, find
from glassformer.planning.training import TrainingPlan, check_workload, plan_training
from glassformer.training import Recipe
from glassformer.units import quantity

WEIGHTS = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a weight, without the scales of groups."""
MASTERED = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What weights are kept in while they are trained."""
SPARE = 0.9
"""Share of a machine's memory that weights and states may fill: the rest is for activations, the context of the driver
and fragments."""


@dataclass(frozen=True)
class Plan:
    """What a model is made of, and generation with weights in `dtype` and states in `state_dtype`, of `batch` sequences
    of `context` tokens."""

    config: ModelConfig
    context: int
    batch: int
    dtype: torch.dtype
    """Of products, and of the weights where these are not packed."""
    state_dtype: torch.dtype
    weights: str
    """What the weights are kept in, one of `WEIGHTS`."""
    parameters: int
    """Tied ones once."""
    active_parameters: int
    """Those that one token meets: of experts, the chosen ones alone."""
    weight_bytes: int
    states: dict[str, int]
    """Bytes of the decode state of one sequence by kind (cache, window, latent, recurrent, source), exactly what
    `model.init_state(1, context, state_dtype)` allocates; a source is as long as the context. None of a model that
    reads in both directions, which does not decode."""
    next_token_bytes: int
    """By how much the state grows with a written token after `context`: 0 where windows and recurrences hold all there
    is."""
    read_parameters: int
    """Those that the step of one token reads: of experts the chosen ones, of embeddings the head's matrix alone, of an
    encoder none."""
    flops: float
    """Forward FLOPs of matrix products per token, as `config.flops` counts them at this context."""
    on: Cluster | None = None
    """The machines that it is planned on."""

    @property
    def state_bytes(self) -> int:
        """Of one sequence."""
        return sum(self.states.values())

    @property
    def decoding(self) -> Decoding | None:
        """The time of a step, on the plan's machines; None without any, for a model that does not decode, and where
        weights and states do not fit."""
        return Decoding(self, self.on) if self.on is not None and self.config.writes and self.fits else None

    @property
    def room(self) -> float | None:
        """Bytes of all of the plan's machines, which divide weights and states; None without any."""
        return None if self.on is None else self.on.count * self.on.machine.memory

    @property
    def smallest_count(self) -> int | None:
        """Of these machines, the fewest whose memory weights and states fit; None without any."""
        return None if self.on is None else max(1, math.ceil(self.bytes / (SPARE * self.on.machine.memory)))

    @property
    def fits(self) -> bool | None:
        return None if self.room is None else self.bytes <= SPARE * self.room

    @property
    def bytes_of_weight(self) -> float:
        return WEIGHTS[self.weights]

    @cached_property
    def expert_parameters(self) -> int:
        """Of all experts that a router chooses among."""
        if self.parameters == self.active_parameters:
            return 0
        return sum(one.parameters for one in self.components if one.name == "experts")

    @cached_property
    def counts(self) -> Counts:
        return Counts(self.config)

    @property
    def components(self) -> tuple[Component, ...]:
        """Parameters by component, each with its formula; they add up to `parameters`."""
        return self.counts.components

    @cached_property
    def training_flops(self) -> Flops:
        """FLOPs of a token in training at this context, by what they are spent on."""
        return self.counts.flops(self.context)

    @property
    def forward_of_layers(self) -> int:
        """FLOPs of the layers over a whole sequence of the context."""
        return round(self.training_flops.recomputed * self.context)

    @property
    def weights_in(self) -> dict[str, float]:
        """Bytes of the weights by what they are kept in."""
        return {name: self.parameters * each for name, each in WEIGHTS.items()}

    def batch_that_fits(self, memory: float) -> int:
        """Sequences of this context whose states fit beside the weights in so many bytes, `SPARE` of them used."""
        left = SPARE * memory - self.weight_bytes
        return max(0, int(left // self.state_bytes)) if self.state_bytes else int(left > 0)

    def context_that_fits(self, memory: float) -> int:
        """The longest context of this batch that fits in so many bytes; 0 for none, at most `MAX_CONTEXT`."""
        left = (SPARE * memory - self.weight_bytes) / self.batch
        least, most = 0, self.config.embedding.limit(self.config.ctx) or MAX_CONTEXT
        if not self.config.writes:
            return most if left >= 0 else 0
        while least < most:
            middle = (least + most + 1) // 2
            if self.config.state_bytes(middle, self.state_dtype) <= left:
                least = middle
            else:
                most = middle - 1
        return least

    def to_dict(self) -> dict[str, Any]:
        """Every figure as plain values."""
        dtypes = {"dtype": self.dtype, "state_dtype": self.state_dtype}
        derived = ("state_bytes", "state_bytes_per_token", "bytes", "bytes_read", "weights_in")
        flops = self.training_flops
        spent = (
            "forward",
            "backward",
            "training",
            "recomputed",
            "scores",
            "share_of_scores",
            "six_n",
            "idle",
            "unlike",
        )
        return {
            **{name: value for name, value in vars(self).items() if name in PLAIN},
            **{name: str(kind).removeprefix("torch.") for name, kind in dtypes.items()},
            **{name: getattr(self, name) for name in derived},
            "symbols": self.counts.symbols,
            "components": [asdict(one) for one in self.components],
            **self._on_machines(),
            **({} if self.decoding is None else {"decoding": self.decoding.to_dict()}),
            "training_flops": {name: getattr(flops, name) for name in spent},
        }

    def _on_machines(self) -> dict[str, Any]:
        if self.room is None:
            return {}
        return {
            "fits": self.fits, "smallest_count": self.smallest_count,
            "batch_that_fits": self.batch_that_fits(self.room), "context_that_fits": self.context_that_fits(self.room),
        }  # fmt: skip

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
        return math.ceil(self.read_parameters * self.bytes_of_weight) + self.batch * self.state_bytes


PLAIN = (
    "context", "batch", "weights", "parameters", "active_parameters", "weight_bytes", "states", "next_token_bytes",
    "read_parameters", "flops",
)  # fmt: skip


@overload
def plan(
    model: ModelLike,
    *,
    train: Literal[False] = False,
    context: int | None = None,
    batch: int = 1,
    dtype: torch.dtype | str = torch.bfloat16,
    state_dtype: torch.dtype | str | None = None,
    weights: str | None = None,
    machine: str | Cluster | None = None,
    nodes: int = 1,
    machines: str | Path | None = None,
    price: str | None = None,
) -> Plan: ...


@overload
def plan(
    model: ModelLike,
    *,
    train: Literal[True],
    context: int | None = None,
    batch: int = 1,
    dtype: torch.dtype | str = torch.bfloat16,
    optimizer: str = "adamw",
    recompute: str = "none",
    layout: Layout | str | None = None,
    finetune: str | None = None,
    weights: str | None = None,
    loss: str = "chunked",
    machine: str | Cluster | None = None,
    nodes: int = 1,
    machines: str | Path | None = None,
    price: str | None = None,
    tokens: float | str | None = None,
) -> TrainingPlan: ...


def plan(
    model: ModelLike,
    *,
    train: bool = False,
    context: int | None = None,
    batch: int = 1,
    dtype: torch.dtype | str = torch.bfloat16,
    state_dtype: torch.dtype | str | None = None,
    optimizer: str = "adamw",
    recompute: str = "none",
    layout: Layout | str | None = None,
    finetune: str | None = None,
    weights: str | None = None,
    loss: str = "chunked",
    machine: str | Cluster | None = None,
    nodes: int = 1,
    machines: str | Path | None = None,
    price: str | None = None,
    tokens: float | str | None = None,
) -> Plan | TrainingPlan:
    """What generating with this model takes, or with `train` a training step.

    context      tokens of a sequence; by default all the model is trained to read
    batch        sequences at once; in training, of all ranks
    dtype        of products, and of the weights in generation
    state_dtype  of the decode state; by default that of the weights
    optimizer, recompute, layout
                 of training; a layout is such as "dp=8,zero=3,recompute=full", by default "dp=N,zero=3"
    finetune     of training, "lora:16": adapters of rank 16 on every linear map, all else frozen in `dtype`
    weights      what they are kept in: in generation "int8" or "int4" too, products in `dtype`; in training "float32",
                 or "bfloat16" with masters in fp32
    loss         of training, what it holds of logits: "chunked" as ours does, "in_place", "fused" or "whole"
                 (`planning/memory.py`)
    machine, nodes
                 accelerators: "h100", as many as the layout has ranks, or "h100:8", eight in each of `nodes` nodes
    machines     a file of machines of one's own
    price        of an accelerator hour, "2.5USD"
    tokens       to train on, 15e12 or "15T": days, energy, and cost

    Raises RequestError for a context that the model cannot have, a layout that does not divide or has other ranks than
    there are accelerators, an unknown machine, or a price without a currency."""
    config, dtype = resolve(model), dtype_of(dtype)
    on = None if machine is None else _on(machine, nodes, machines, price)
    if on is None and (price is not None or nodes != 1 or machines is not None or tokens is not None):
        given = {"price": price, "machines": machines, "tokens": tokens, "nodes": None if nodes == 1 else nodes}
        field = next(name for name, value in given.items() if value is not None)
        expected = "left out without a machine, such as h100:8"
        raise RequestError(code="conflict", field=field, value=given[field], expected=expected)
    context = config.context if context is None else context
    check_workload(config, batch, context)
    if train:
        chosen = Recipe.of(tokens=1, optimizer=optimizer).optimizer
        default = Layout(dp=on.count, zero=3) if on is not None and on.count > 1 else Layout()
        shared = Layout.of(layout) if isinstance(layout, str) else layout or default
        if recompute != "none":
            shared = shared.recomputing(recompute)
        device = on.machine.device if on is not None else "cpu"
        kept = weights or "float32"
        _check_one_of("weights", kept, MASTERED)
        _check_one_of("loss", loss, LOSSES)
        if finetune is not None and kept != "float32":
            expected = "nothing beside finetune, whose frozen weights are kept in dtype"
            raise RequestError(code="conflict", field="weights", value=weights, expected=expected)
        planned = plan_training(
            config, batch, context, dtype, chosen, shared, MASTERED[kept], device,
            cast(Loss, loss), _rank(finetune),
        )  # fmt: skip
        return planned.placed(on, _tokens(tokens))
    if tokens is not None:
        raise RequestError(code="conflict", field="tokens", value=tokens, expected="train=True beside it")
    state_dtype = dtype if state_dtype is None else dtype_of(state_dtype, "state_dtype")
    packed = weights or str(dtype).removeprefix("torch.")
    _check_one_of("weights", packed, WEIGHTS)
    cost = config.costs(Shape(1, 1, context, "decode", dtype, state_dtype=state_dtype))
    unread = ("embedding", "head", "encoder")
    idle = sum(cost[name].active_parameters for name in unread if name in cost.children)
    states, added = _states(config, context, state_dtype), 0
    if states:
        longer = config.state_bytes(context + 1, state_dtype) - cost.state_bytes
        added = longer - states.get("source", 0) // context
    return Plan(
        config=config,
        context=context,
        batch=batch,
        dtype=dtype,
        state_dtype=state_dtype,
        parameters=cost.parameters,
        active_parameters=cost.active_parameters,
        read_parameters=cost.active_parameters - idle + config.vocab_size * config.d_model,
        weights=packed,
        weight_bytes=math.ceil(cost.parameters * WEIGHTS[packed]),
        states=states,
        next_token_bytes=added,
        flops=float(cost.flops),
        on=on,
    )


def search(
    model: ModelLike,
    *,
    machine: str | Cluster,
    context: int | None = None,
    batch: int = 1,
    dtype: torch.dtype | str = torch.bfloat16,
    optimizer: str = "adamw",
    nodes: int = 1,
    machines: str | Path | None = None,
    price: str | None = None,
    tokens: float | str | None = None,
) -> Search:
    """Layouts of all accelerators of a machine, "h100:8", that a training step of `batch` sequences fits, the fastest
    first by its planned time, each with the days of `tokens`; and why faster ones do not fit.

    Raises RequestError for a context that the model cannot have, a batch that no layout divides, an unknown machine."""
    config, dtype = resolve(model), dtype_of(dtype)
    chosen = Recipe.of(tokens=1, optimizer=optimizer).optimizer
    context = config.context if context is None else context
    check_workload(config, batch, context)
    on, many = _on(machine, nodes, machines, price), _tokens(tokens)
    found = find(config, batch, context, dtype, chosen, on)
    return replace(found, fitting=tuple(one.placed(on, many) for one in found.fitting))


def _states(config: ModelConfig, context: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes by kind of the decode state of a sequence, and of a source as long."""
    if not config.writes:
        return {}
    memory_len = context if config.encoder is not None else 0
    return config.outline().init_state(1, context, dtype, device="meta", memory_len=memory_len).by_kind()


def _rank(finetune: str | None) -> int:
    """Of adapters: 16 of "lora:16", 0 of None."""
    if finetune is None:
        return 0
    kind, _, rank = finetune.partition(":")
    if kind != "lora" or not (rank.isascii() and rank.isdecimal() and 0 < len(rank) < 6 and int(rank)):
        raise RequestError(code="range", field="finetune", value=finetune, expected="lora:RANK, such as lora:16")
    return int(rank)


def _tokens(asked: float | str | None) -> float | None:
    """To train on: 15e12 of "15T"."""
    tokens = None if asked is None else quantity(asked, field="tokens")
    if tokens is not None and tokens < 1:
        raise RequestError(code="range", field="tokens", value=asked, expected="a number of tokens from 1 up")
    return tokens


def _check_one_of(field: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise RequestError(code="unknown", field=field, value=value, expected=f"one of {', '.join(known)}")


def _on(machine: str | Cluster, nodes: int, own: str | Path | None, price: str | None) -> Cluster:
    on = cluster(machine, nodes, own) if isinstance(machine, str) else machine
    if on.count > RANKS:
        expected = f"{RANKS:,} accelerators at most, with the nodes"
        raise RequestError(code="range", field="machine", value=machine, expected=expected)
    return on if price is None else replace(on, machine=on.machine.vary(price=Price.of(price)))
