"""Division of a parameter among tensor-parallel ranks ("owners"), declared as data next to the part that holds the
parameter.

A module's `shards` maps the name of each parameter to the cuts (`Shard`), one for each linear layer stacked in the
parameter; a parameter that is not named is replicated. For y = x W^T with W (o, i):

column      rows of W, outputs:     y = [x W_1^T, x W_2^T]          W_Q, W_K, W_V, W_gate, W_up and their biases
row         columns of W, inputs:   y = x_1 W_1^T + x_2 W_2^T       W_O, W_down; the bias is added once
expert      rows of W, by experts:  y = y_1 + y_2                   the experts' layers
vocab       rows of a table (v, d), by tokens: logits = [l_1, l_2]  embedding and head
replicated  every owner holds all of it

The names are Megatron's (Shoeybi et al. 2019, 1909.08053). A fused matrix must be cut layer by layer: half of the rows
of [W_Q; W_K; W_V] is not half of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from glassformer.errors import RequestError

Cut = Literal["column", "row", "expert", "vocab", "replicated"]


@dataclass(frozen=True)
class Shard:
    """Division of one linear layer among tensor-parallel ranks ("owners"), its "cut". `units` is the number of equal
    pieces that stay whole (heads, experts); None if single rows or columns may be separated.

    `rows`: number of rows of the layer in its parameter; None for all of them."""

    cut: Cut = "replicated"
    units: int | None = None
    rows: int | None = None

    @property
    def axis(self) -> int:
        """Axis along which the parameter is divided: 0 for rows, 1 for columns."""
        return 1 if self.cut == "row" else 0

    def piece(self, values: Tensor, owner: int, owners: int) -> Tensor:
        """Returns owner number `owner`'s shard, of `owners`, of a layer's weight (o, i) or bias (o,).

        Raises RequestError if `owners` does not divide the units."""
        if self.cut == "replicated" or self.axis >= values.dim():
            return values
        first, last = self.span(values.shape[self.axis], owner, owners)
        return values.narrow(self.axis, first, last - first)

    def span(self, size: int, owner: int, owners: int) -> tuple[int, int]:
        """Returns (first, last): owner number `owner` of `owners` has first .. last-1 of `size` rows or columns. Shares
        are equal, except those of a vocabulary, which may differ by one.

        Raises RequestError if `owners` does not divide the units."""
        units = self.units or size
        if self.cut != "vocab" and units % owners:
            raise RequestError(code="range", field="owners", value=owners, expected=f"a divisor of {units}")
        return owner * size // owners, (owner + 1) * size // owners


REPLICATED = Shard()

Shards = dict[str, tuple[Shard, ...]]
"""Mapping from the name of a parameter to the cuts (`Shard`) of the layers stacked by rows in the parameter."""


def declared(module: nn.Module) -> Shards:
    """Returns the cuts (`Shard`) that a module declares for its parameters, by name; empty without a declaration."""
    found: Shards = getattr(module, "shards", {})
    return found


def shards_of(model: nn.Module) -> Shards:
    """Returns {full name: cuts (`Shard`)} for every parameter of a model; a parameter without a declared cut is
    replicated."""
    found: Shards = {}
    for path, module in model.named_modules():
        own = declared(module)
        for name, _ in module.named_parameters(recurse=False):
            found[f"{path}.{name}".removeprefix(".")] = own.get(name, (REPLICATED,))
    return found


Region = tuple[tuple[int, int], ...]
"""Rectangular part of a tensor: (first, last) for each axis."""


def regions(shape: Sequence[int], shards: tuple[Shard, ...], owner: int, owners: int) -> list[Region]:
    """Returns the regions that an owner's shard takes from a parameter of this shape, one for each stacked layer; the
    shard stacks them by rows."""
    made, row = [], 0
    for shard in shards:
        rows = shape[0] if len(shards) == 1 else shard.rows or 0
        spans = [(row, row + rows), *((0, size) for size in shape[1:])] if shape else []
        if shard.cut != "replicated" and shard.axis < len(spans):
            begin, end = spans[shard.axis]
            first, last = shard.span(end - begin, owner, owners)
            spans[shard.axis] = begin + first, begin + last
        made.append(tuple(spans))
        row += rows
    return made


def piece_of(values: Tensor, shards: tuple[Shard, ...], owner: int, owners: int) -> Tensor:
    """Returns an owner's shard of a parameter: the shards of its layers, stacked by rows."""
    if len(shards) == 1:
        return shards[0].piece(values, owner, owners)
    maps = values.split([shard.rows or 0 for shard in shards])
    return torch.cat([shard.piece(one, owner, owners) for shard, one in zip(shards, maps, strict=True)])
