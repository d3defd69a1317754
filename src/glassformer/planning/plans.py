"""Plan of generation: the counts of a model, and memory and time of generating with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from rich.console import RenderableType

from glassformer.config import MAX_CONTEXT, ModelConfig
from glassformer.errors import RequestError
from glassformer.figures import seconds
from glassformer.figures.terminal import dim, size, unruled
from glassformer.parallel.layout import Layout, tensor_parallel
from glassformer.parts.core.cost import Shape
from glassformer.planning.counts import Component, Counts, Flops, Layer, component_table, layer_table
from glassformer.planning.decoding import Decoding
from glassformer.planning.machines import NODE, Cluster, money, span
from glassformer.planning.planned import PrintedPlan, columns, page_of

WEIGHTS = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes per weight by dtype, without the scales of quantised groups."""
SPARE = 0.9
"""Share of a machine's memory that weights and states may fill: the rest is for activations, the driver's context and
fragmentation."""


@dataclass(frozen=True)
class Plan(PrintedPlan):
    """Counts of a model, and costs of generating `batch` sequences of `context` tokens, with weights in `dtype` and
    states in `state_dtype`."""

    config: ModelConfig
    context: int
    batch: int
    dtype: torch.dtype
    """dtype of matmuls, and of the weights unless these are quantised."""
    state_dtype: torch.dtype
    weights: str
    """dtype of stored weights, a key of `WEIGHTS`."""
    parameters: int
    """Number of parameters; tied ones count once."""
    active_parameters: int
    """Parameters that one token passes: of experts, only those it is routed to."""
    weight_bytes: int
    states: dict[str, int]
    """Bytes of the decode state of one sequence by kind (cache, window, latent, recurrent, source), exactly what
    `model.init_state(1, context, state_dtype)` allocates; a source is as long as the context. Empty for a bidirectional
    model, which does not decode."""
    next_token_bytes: int
    """Growth of the state per token after `context`, in bytes: 0 if the model has only windows and recurrences."""
    read_parameters: int
    """Parameters read in the decoding step of one token: of experts the routed ones, of embeddings only the head's
    matrix, of an encoder nothing."""
    flops: float
    """Forward FLOPs of matmuls per token, as `config.flops` counts them at this context."""
    on: Cluster | None = None
    """Machines to plan for; None for counts only."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the decode state of one sequence."""
        return sum(self.states.values())

    @property
    def decoding(self) -> Decoding | None:
        """Time of a decoding step on the plan's machines; None without machines, for a model that does not decode, or
        if weights and states do not fit."""
        if self.on is None or self.layout is None or not (self.config.writes and self.fits):
            return None
        return Decoding(self, replace(self.on, count=self.layout.ranks))

    @cached_property
    def layout(self) -> Layout | None:
        """Layout that divides weights and states among as large a part of the plan's accelerators as possible: tensor
        parallel within a node, pipeline stages across nodes. None without accelerators."""
        if self.on is None:
            return None
        tp = self._owners[-1]
        return Layout(tp=tp, pp=min(max(1, self.on.count // tp), self.config.n_layers))

    @cached_property
    def smallest(self) -> Layout | None:
        """Smallest layout whose accelerators hold weights and states; None without accelerators, or if no layout
        does."""
        if self.on is None:
            return None
        count = max(1, math.ceil(self.bytes / (SPARE * self.on.machine.memory)))
        node = self.on.node if self.on.count > self.on.node else max(NODE, self.on.node)
        owners = tensor_parallel(self.config, node) if count > 1 else [1]
        tp = next((ranks for ranks in owners if ranks >= count), owners[-1])
        pp = math.ceil(count / tp)
        return Layout(tp=tp, pp=pp) if pp <= self.config.n_layers else None

    @cached_property
    def _owners(self) -> list[int]:
        """Numbers of ranks among which tensor parallelism within a node can divide the model, ascending."""
        assert self.on is not None
        return tensor_parallel(self.config, min(self.on.count, self.on.node)) if self.on.count > 1 else [1]

    @property
    def room(self) -> float | None:
        """Memory in bytes of all accelerators that `layout` uses; None without accelerators."""
        return None if self.on is None or self.layout is None else self.layout.ranks * self.on.machine.memory

    @property
    def smallest_count(self) -> int | None:
        """Fewest accelerators that hold weights and states; None without accelerators, or if no number suffices."""
        return None if self.smallest is None else self.smallest.ranks

    @property
    def fits(self) -> bool | None:
        return None if self.room is None else self.bytes <= SPARE * self.room

    @property
    def bytes_of_weight(self) -> float:
        return WEIGHTS[self.weights]

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts."""
        if self.parameters == self.active_parameters:
            return 0
        return sum(one.parameters for one in self.components if one.name == "experts")

    @cached_property
    def counts(self) -> Counts:
        return Counts(self.config)

    @property
    def components(self) -> tuple[Component, ...]:
        """Parameters by component, each with its formula; they sum to `parameters`."""
        return self.counts.components

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Each kind of layer by matrix: parameters, share of the layer, and FLOPs per token at this context."""
        return self.counts.layers(self.context)

    @cached_property
    def training_flops(self) -> Flops:
        """FLOPs per token in training at this context, by purpose."""
        return self.counts.flops(self.context)

    @property
    def forward_of_layers(self) -> int:
        """Forward FLOPs of the layers over a whole sequence of the context."""
        return round(self.training_flops.recomputed * self.context)

    @property
    def weights_in(self) -> dict[str, float]:
        """Bytes of all weights, by dtype of `WEIGHTS`."""
        return {name: self.parameters * each for name, each in WEIGHTS.items()}

    def batch_that_fits(self, memory: float) -> int:
        """Returns the number of sequences of this context whose states fit next to the weights in `memory` bytes, of
        which the share `SPARE` is used."""
        left = SPARE * memory - self.weight_bytes
        return max(0, int(left // self.state_bytes)) if self.state_bytes else int(left > 0)

    def context_that_fits(self, memory: float) -> int:
        """Returns the longest context of this batch that fits in `memory` bytes: 0 if no context fits, at most
        `MAX_CONTEXT`."""
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
        """Returns every value as plain types."""
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
            "name": self.name,
            **{name: value for name, value in vars(self).items() if name in PLAIN},
            **{name: str(kind).removeprefix("torch.") for name, kind in dtypes.items()},
            **{name: getattr(self, name) for name in derived},
            "symbols": self.counts.symbols,
            "components": [asdict(one) for one in self.components],
            "layers": [{**asdict(one), "parameters": one.parameters, "flops": one.flops} for one in self.layers],
            **self._on_machines(),
            **({} if self.decoding is None else {"decoding": self.decoding.to_dict()}),
            "training_flops": {name: getattr(flops, name) for name in spent},
        }

    def _on_machines(self) -> dict[str, Any]:
        if self.room is None:
            return {}
        return {
            "fits": self.fits, "smallest_count": self.smallest_count,
            "layout": self.layout and str(self.layout), "smallest": self.smallest and str(self.smallest),
            "batch_that_fits": self.batch_that_fits(self.room), "context_that_fits": self.context_that_fits(self.room),
        }  # fmt: skip

    def page(self) -> dict[str, Any]:
        return page_of(self.config, self.on, self.name, self.to_dict())

    def beside(self, *others: Plan) -> Iterator[str | RenderableType]:
        plans = (self, *others)
        table = columns("", plans)
        kinds = list(dict.fromkeys(kind for one in plans for kind in one.states))
        for what, cell in ROWS.items():
            if what == ADDED and not any(one.next_token_bytes != one.state_bytes_per_token for one in plans):
                continue
            keeps = what == STATE and kinds and KEYS_AND_VALUES.issuperset(kinds)
            table.add_row("KV cache of a sequence" if keeps else what, *map(cell, plans))
            if what == STATE and len(kinds) > 1:
                for kind in kinds:
                    table.add_row(f"  {kind}", *(size(one.states[kind]) if kind in one.states else "" for one in plans))
            if what == WEIGHTS_ROW:
                for kept in WEIGHTS:
                    table.add_row(f"  in {kept}", *(size(one.weights_in[kept]) for one in plans))
        if self.on is not None:
            table.add_row(f"fits on {self.on.count} {self.on.name}", *map(_fits, plans))
            for what, cell in FITTING.items():
                table.add_row(what, *map(cell, plans))
            if any(one.decoding is not None for one in plans):
                for what, of in DECODING.items():
                    table.add_row(what, *("" if one.decoding is None else of(one.decoding) for one in plans))
        yield table
        rows = "one sequence" if self.batch == 1 else f"{self.batch} sequences"
        state = str(self.state_dtype).removeprefix("torch.")
        source = "; a source is as long" if any(one.config.encoder is not None for one in plans) else ""
        yield dim(f"weights in {self.weights}, state in {state}, {rows} of that context{source}")
        if self.on is not None:
            yield dim(self.on.priced)
        for one in plans:
            if one.explain:
                yield from one.explained()
            else:
                yield dim(f"parameters{f' of {one.name}' if others else ''}: {one.shares}")

    @property
    def shares(self) -> str:
        """Share of the parameters that each component (embedding, mixer, FFN, ...) has, largest first, as text."""
        found = sorted(self.components, key=lambda part: -part.parameters)
        return ", ".join(f"{part.name} {part.share:.1%}" for part in found if part.share >= 0.0005)

    def explained(self) -> Iterator[str | RenderableType]:
        """Yields every value with its formula: parameters by component, one layer of each kind by matrix, training
        FLOPs by purpose."""
        yield component_table(self.components, self.name)
        for layer in self.layers:
            yield layer_table(layer)
        yield dim(", ".join(f"{letter} = {n:,}" for letter, n in self.counts.symbols.items()))
        flops = self.training_flops
        unmet = (
            {"- experts not met": (-flops.idle, f"-6 * {self.parameters - self.active_parameters}")}
            if flops.idle
            else {}
        )
        rows = {
            "forward": (flops.forward, "2 for each weight in a product and token, and every query against all keys"),
            "backward": (flops.backward, "2 forward: the gradients of both operands of each product"),
            "full recompute adds": (flops.recomputed, "the forward pass of the layers once more"),
            "6 N": (flops.six_n, f"6 * {self.parameters}"),
            **unmet,
            "+ lookups, norms, repeats": (flops.unlike, "weights in no product, less those in several"),
            "+ scores": (
                flops.scores,
                f"{flops.share_of_scores:.1%}: grows with the context, {self.context:,} tokens here",
            ),
            "= training": (flops.training, "forward + backward"),
        }
        spent = unruled()
        for head in ("FLOPs of a token in training", "", "made of"):
            spent.add_column(head, justify="left" if head else "right", overflow="fold")
        for what, (value, made_of) in rows.items():
            spent.add_row(what, f"{value:.4g}", made_of)
        yield spent
        layers = f"{self.config.n_layers} layers" if self.config.n_layers > 1 else "one layer"
        yield f"forward, {layers}, {self.context:,} tokens: {self.forward_of_layers:,} FLOPs"

    @property
    def state_bytes_per_token(self) -> float:
        return self.state_bytes / self.context

    @property
    def bytes(self) -> int:
        """Bytes of the weights and of the states of the batch."""
        return self.weight_bytes + self.batch * self.state_bytes

    @property
    def bytes_read(self) -> int:
        """Minimum bytes read in a decoding step of the batch: weights once, and every state. Divided by the memory's
        bandwidth, the shortest possible time of a step. (A batch routes to more experts than one token does, up to
        all.)"""
        return math.ceil(self.read_parameters * self.bytes_of_weight) + self.batch * self.state_bytes


PLAIN = (
    "context", "batch", "weights", "parameters", "active_parameters", "weight_bytes", "states", "next_token_bytes",
    "read_parameters", "flops",
)  # fmt: skip


STATE, WEIGHTS_ROW, ADDED = "state of a sequence", "weights", "added by the next token"
KEYS_AND_VALUES = {"cache", "window", "latent", "source"}
"""Kinds of state that are a KV cache; other kinds are states of recurrences."""
ROWS: dict[str, Callable[[Plan], str]] = {
    "parameters": lambda one: f"{one.parameters:,}",
    "  in the layers": lambda one: f"{one.config.num_params(embeddings=False):,}",
    "active for one token": lambda one: f"{one.active_parameters:,}",
    WEIGHTS_ROW: lambda one: size(one.weight_bytes),
    "context": lambda one: f"{one.context:,}",
    STATE: lambda one: size(one.state_bytes) if one.states else "none",
    "state per token": lambda one: f"{one.state_bytes_per_token:,.0f} B",
    ADDED: lambda one: f"{one.next_token_bytes:,} B",
    "weights and states": lambda one: size(one.bytes),
    "read per decoding step": lambda one: size(one.bytes_read),
    "FLOPs per token": lambda one: f"{one.flops:.3g}",
}
FITTING: dict[str, Callable[[Plan], str]] = {
    "sequences that fit": lambda one: f"{one.batch_that_fits(one.room or 0):,}",
    "context that fits": lambda one: f"{one.context_that_fits(one.room or 0):,}",
}
DECODING: dict[str, Callable[[Decoding], str]] = {
    "time of a decoding step": lambda one: span(*one.seconds, seconds),
    "tokens a second": lambda one: span(*one.tokens_per_second),
    "prefill of a full context": lambda one: span(*one.first_token, seconds),
    "compute-bound": lambda one: (
        "at no batch size" if one.turning_batch is None else f"from {one.turning_batch:,} sequences"
    ),
    "a million tokens cost": lambda one: money(one.cost_per_million),
}


def _fits(one: Plan) -> str:
    """Returns "yes" if the plan fits its accelerators; otherwise, as text, the number of accelerators that would
    suffice, with their layout if it has several."""
    assert one.layout is not None and one.on is not None
    if one.fits:
        return "yes" if one.layout.ranks == one.on.count else f"yes, on {one.layout.ranks:,} ({one.layout})"
    return f"no: {one.smallest_count:,} would do ({one.smallest})" if one.smallest is not None else "no"


def generation(
    config: ModelConfig,
    batch: int,
    context: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype | None = None,
    weights: str | None = None,
    on: Cluster | None = None,
) -> Plan:
    """Returns the plan of generating with a model; options as in `gf.plan`. Raises RequestError if `weights` is not a
    key of `WEIGHTS`."""
    state_dtype = state_dtype or dtype
    packed = weights or str(dtype).removeprefix("torch.")
    check_one_of("weights", packed, WEIGHTS)
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


def _states(config: ModelConfig, context: int, dtype: torch.dtype) -> dict[str, int]:
    """Returns {kind: bytes} of one sequence's decode state; the source of an encoder is as long as the context."""
    if not config.writes:
        return {}
    memory_len = context if config.encoder is not None else 0
    return config.outline().init_state(1, context, dtype, device="meta", memory_len=memory_len).by_kind()


def check_one_of(field: str, value: str, known: Collection[str]) -> None:
    """Raises RequestError if the value is not one of the known ones."""
    if value not in known:
        raise RequestError(code="unknown", field=field, value=value, expected=f"one of {', '.join(known)}")
