"""The collectives of a training step: how many, over which axis, and the bytes of a rank, exactly as the trainer makes
them (`parallel/`).

sharding   all-gather   of each micro-batch: every layer's weights twice, for either pass, all others once, in what they
                        travel; all-to-all: every gradient once, in fp32
copies     the sum of all gradients of a rank, once a step: an all-to-all and an all-gather of each bucket
tensor     all-reduce   of each micro-batch: the residual stream once a branch and pass, of the embedding and before
                        the head, and three numbers of a token for the loss; with sp a gather and a scatter a branch
                        and pass in their place

Bytes are those of the whole tensor: what all ranks have of it together. Rows are padded to a multiple of the ranks.
Not counted: experts over ranks, whose rows are as many as the router sends, context and stages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from glassformer.config import ModelConfig
from glassformer.parallel.apply import travels_in_half
from glassformer.parallel.layout import Layout
from glassformer.parallel.sums import buckets
from glassformer.parallel.tensor import divided_parts
from glassformer.parts.owner import is_branch
from glassformer.planning.ranks import weights_of
from glassformer.training.optimizers import AdamWConfig

_LAYER = re.compile(r"(encoder\.)?layers\.\d+")
GRADIENT = 4
"""Bytes of a value of a gradient that is added up."""
NUMBERS = 3
"""Of a token, which ranks that share the vocabulary tell each other: the largest logit, the sum, the target's."""


@dataclass(frozen=True)
class Collective:
    """So many operations of a kind in a step, between the ranks of an axis, and the bytes of them all."""

    axis: str
    operation: str
    count: int
    bytes: int


def collectives(config: ModelConfig, layout: Layout, batch: int, context: int, dtype: torch.dtype) -> list[Collective]:
    """Those of a rank in a step of `batch` sequences of all ranks; `dtype`: of the products."""
    pieces = layout.microbatches(batch)
    found = _of_weights(config, layout, pieces, dtype) if layout.pp == layout.ep == 1 else []
    if layout.tp > 1 and layout.pp == layout.cp == 1:
        found += _of_stream(config, layout, pieces, layout.microbatch(batch) * context, dtype)
    return found


def _of_weights(config: ModelConfig, layout: Layout, pieces: int, dtype: torch.dtype) -> list[Collective]:
    model, fsdp = config.outline(), layout.fsdp
    half = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if dtype.itemsize < GRADIENT and travels_in_half(module)
        for name, _ in module.named_parameters(recurse=False)
    }
    weights = dict(weights_of(config, AdamWConfig(), layout.tp, 1, fsdp))
    found = []
    if fsdp > 1:
        layers = {name: match[0] for name in weights if (match := _LAYER.match(name))}
        units = len(set(layers.values())) + len({layers[name] for name in half if name in layers})
        gathered = sum(
            one.gathered * (2 if name in layers else 1)
            * (dtype.itemsize if name in half and name in layers else GRADIENT)
            for name, one in weights.items()
        )  # fmt: skip
        traded = GRADIENT * sum(one.gathered for one in weights.values())
        found = [
            Collective("fsdp", "all-gather", pieces * (2 * units + 1), pieces * gathered),
            Collective("fsdp", "all-to-all", pieces * (units + 1), pieces * traded),
        ]
    for axis, ranks in (("replicate", layout.dp // fsdp), ("cp", layout.cp)):
        if ranks > 1:
            sizes = [
                sum(at.stop - at.start for _, at in one) for one in buckets(one.shards for one in weights.values())
            ]
            values = sum(-(-one // ranks) * ranks for one in sizes)
            found += [
                Collective(axis, operation, len(sizes), GRADIENT * values) for operation in ("all-to-all", "all-gather")
            ]
    return found


def _of_stream(config: ModelConfig, layout: Layout, pieces: int, tokens: int, dtype: torch.dtype) -> list[Collective]:
    branches = sum(is_branch(part) for _, part in divided_parts(config.outline()))
    stream = tokens * config.d_model
    ends = 2 * stream * GRADIENT  # embedding and head compute in fp32 what they add up
    numbers = NUMBERS * tokens * GRADIENT
    inside = 2 * branches * stream * dtype.itemsize
    if not layout.sp:
        count, size = 2 * branches + 2 + NUMBERS, inside + ends + numbers
        return [Collective("tp", "all-reduce", pieces * count, pieces * size)]
    return [
        Collective("tp", "all-reduce", pieces * (2 + NUMBERS), pieces * (ends + numbers)),
        Collective("tp", "all-gather", pieces * (2 * branches + 2), pieces * (inside + ends)),
        Collective("tp", "reduce-scatter", pieces * 2 * branches, pieces * inside),
    ]
