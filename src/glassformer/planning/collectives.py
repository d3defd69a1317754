"""Collectives of a training step, as `parallel/` runs them: their number, mesh axis, and bytes.

fsdp       all-gather      per microbatch: every layer's weights twice (forward, backward), other weights once, in the
                           dtype of the transfer
           all-to-all      every gradient once, in fp32
edp        as fsdp         for expert weights, among the ranks that hold the same experts
ep         all-to-all      per microbatch and layer of experts: row counts, rows, results, and the gradients of rows and
                           results
replicate  all-to-all,     once a step and bucket: the sum of all gradients of a rank; also over cp
           all-gather
cp         all-gather      per microbatch: keys and values of every layer
           reduce-scatter  gradients of keys and values
           all-reduce      the loss
tp         all-reduce      per microbatch: the residual stream once per branch and pass, after the embedding and before
                           the head, and three numbers a token for the loss; with sp, a gather and a scatter replace
                           each all-reduce of a branch
pp         send            per microbatch: the residual stream to the next stage, its gradient to the previous one
           broadcast       the losses

With pipeline stages, counts are those of the rank that sends most, and gradients those of the largest stage. Bytes are
of the whole tensor, over all ranks. Rows are padded to a multiple of the ranks; experts are assumed balanced. Not
counted: messages of a few bytes per step (norms of rows, losses, loads of experts).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from glassformer.config import ModelConfig
from glassformer.parallel.apply import travels_in_half
from glassformer.parallel.layout import Layout
from glassformer.parallel.sums import bucket_of, buckets
from glassformer.parallel.tensor import divided_parts
from glassformer.parts.core.exchange import Exchanging
from glassformer.parts.core.owner import is_branch
from glassformer.planning.ranks import RankWeights, owned, weights_of
from glassformer.training.optimizers import AdamWConfig

_LAYER = re.compile(r"(encoder\.)?layers\.\d+")
GRADIENT = 4
"""Bytes of one element of a gradient that is reduced (fp32)."""
COUNT = 8
"""Bytes of one row count of an expert (int64)."""
NUMBERS = 3
"""Values per token that ranks of a divided vocabulary exchange: the largest logit, the sum, the target's logit."""


@dataclass(frozen=True)
class Collective:
    """Communication operations of one kind over one mesh axis: their count and their total bytes, per step."""

    axis: str
    operation: str
    count: int
    bytes: int


def collectives(
    config: ModelConfig, layout: Layout, batch: int, context: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Collective]:
    """Returns the collectives of one rank in a step of `batch` sequences over all ranks; `dtype`: of the matmuls."""
    pieces, tokens = layout.microbatches(batch), layout.microbatch(batch) * context
    found = _of_weights(config, layout, pieces, dtype, bucket_of(device))
    if layout.ep > 1:
        found.append(_of_experts(config, layout, pieces, tokens, dtype))
    if layout.cp > 1:
        found += _of_keys(config, layout, pieces, layout.microbatch(batch), context, dtype)
    if layout.tp > 1:
        found += _of_stream(config, layout, pieces, tokens, dtype)
    if layout.pp > 1:
        found += _of_stages(config, layout, pieces, tokens)
    return found


def _of_weights(config: ModelConfig, layout: Layout, pieces: int, dtype: torch.dtype, bucket: int) -> list[Collective]:
    fsdp, half = layout.fsdp, _in_half(config, dtype)
    weights = _most_of_a_stage(config, layout)
    found = []
    for axis, ranks in (("fsdp", fsdp), ("edp", fsdp // layout.ep if layout.ep > 1 else 1)):
        here = {
            name: one for name, one in weights.items() if (axis == "edp") == bool(layout.ep > 1 and one.experts)
        }  # fmt: skip
        if ranks == 1 or not here:
            continue
        layers = {name: match[0] for name in here if (match := _LAYER.match(name))}
        units = len({(layer, name in half) for name, layer in layers.items()})
        root = len(layers) < len(here)
        gathered = sum(
            one.gathered * (2 if name in layers else 1)
            * (dtype.itemsize if name in half and name in layers else GRADIENT)
            for name, one in here.items()
        )  # fmt: skip
        traded = GRADIENT * sum(one.gathered for one in here.values())
        found += [
            Collective(axis, "all-gather", pieces * (2 * units + root), pieces * gathered),
            Collective(axis, "all-to-all", pieces * (units + root), pieces * traded),
        ]
    for axis, ranks in (("replicate", layout.dp // fsdp), ("cp", layout.cp)):
        if ranks > 1:
            each = buckets((one.shards for one in weights.values()), bucket)
            sizes = [sum(at.stop - at.start for _, at in one) for one in each]
            values = sum(-(-one // ranks) * ranks for one in sizes)
            found += [
                Collective(axis, operation, len(sizes), GRADIENT * values) for operation in ("all-to-all", "all-gather")
            ]
    return found


def _in_half(config: ModelConfig, dtype: torch.dtype) -> set[str]:
    """Returns the names of the matrices whose weights are transferred in `dtype`; empty if `dtype` has 4 bytes or
    more."""
    modules = [(path, one) for path, one in config.outline().named_modules() if travels_in_half(one)]
    names = {f"{path}.{name}" for path, one in modules for name, _ in one.named_parameters(recurse=False)}
    return names if dtype.itemsize < GRADIENT else set()


def _most_of_a_stage(config: ModelConfig, layout: Layout) -> dict[str, RankWeights]:
    """Returns {weight name: numbers of elements on one rank}, in the model's order; with pipeline stages, only of the
    largest stage."""
    weights = dict(weights_of(config, AdamWConfig(), layout.tp, layout.ep, layout.fsdp))
    if layout.pp == 1:
        return weights

    def of(stage: int, name: str) -> bool:
        steps = name.split(".")
        if steps[0] == "layers":
            return int(steps[1]) in layout.layers_of(stage, config.n_layers)
        return stage == (layout.pp - 1 if steps[0] in ("head", "final_norm") else 0)

    held = [{name: one for name, one in weights.items() if of(stage, name)} for stage in range(layout.pp)]
    return max(held, key=lambda here: sum(one.shards for one in here.values()))


def _of_experts(config: ModelConfig, layout: Layout, pieces: int, tokens: int, dtype: torch.dtype) -> Collective:
    parts: list[Any] = [part for part in config.outline().modules() if isinstance(part, Exchanging)]
    counts = sum(COUNT * part.n_experts for part in parts)
    rows = sum(part.router.top_k for part in parts) * tokens
    size = counts + 4 * rows * config.d_model * dtype.itemsize
    return Collective("ep", "all-to-all", pieces * 5 * len(parts), pieces * size)


def _of_keys(
    config: ModelConfig, layout: Layout, pieces: int, rows: int, context: int, dtype: torch.dtype
) -> list[Collective]:
    layers: Any = owned(config, layout.tp).outline().layers
    kept = [layer.mixer.init_state(1, 1, torch.float32) for layer in layers]
    widths = [state.nbytes // torch.float32.itemsize for state in kept if state is not None and state.nbytes]
    padded = rows * -(-context // layout.cp) * layout.cp
    size = pieces * padded * sum(widths) * dtype.itemsize
    count = pieces * 2 * len(widths)  # keys and values, or a latent and the rotary key
    return [
        Collective("cp", "all-gather", count, size),
        Collective("cp", "reduce-scatter", count, size),
        Collective("cp", "all-reduce", pieces, pieces * GRADIENT),
    ]


def _of_stages(config: ModelConfig, layout: Layout, pieces: int, tokens: int) -> list[Collective]:
    stages = layout.pp * layout.interleave
    sends = max(
        sum((stage + 1 < stages) + (stage > 0) for stage in range(rank, stages, layout.pp))
        for rank in range(layout.pp)
    )  # fmt: skip
    return [
        Collective("pp", "send", pieces * sends, pieces * sends * tokens * config.d_model * GRADIENT),
        Collective("pp", "broadcast", 1, pieces * GRADIENT),
    ]


def _of_stream(config: ModelConfig, layout: Layout, pieces: int, tokens: int, dtype: torch.dtype) -> list[Collective]:
    branches = sum(is_branch(part) for _, part in divided_parts(config.outline()))
    own = tokens // layout.cp
    stream = own * config.d_model
    ends = (tokens + own) * config.d_model * GRADIENT  # embeddings before cp divides the tokens, and head
    numbers = NUMBERS * own * GRADIENT
    inside = 2 * branches * stream * dtype.itemsize
    if not layout.sp:
        count, size = 2 * branches + 2 + NUMBERS, inside + ends + numbers
        return [Collective("tp", "all-reduce", pieces * count, pieces * size)]
    return [
        Collective("tp", "all-reduce", pieces * (2 + NUMBERS), pieces * (ends + numbers)),
        Collective("tp", "all-gather", pieces * (2 * branches + 2), pieces * (inside + 2 * stream * GRADIENT)),
        Collective("tp", "reduce-scatter", pieces * 2 * branches, pieces * inside),
    ]
