"""Pieces of whole tensors that this rank holds: index boxes, and views of their elements.

A rank holds a tensor whole; or its rows by FSDP2 (a `DTensor`); or its share of each matrix stacked in it, as the part
declares (`parts/core/shard.py`); or rows of these. For a matrix of four query heads and two each of keys and values:

    whole          [q0 q1 q2 q3 | k0 k1 | v0 v1]
    tp=2           [q0 q1 | k0 | v0]   [q2 q3 | k1 | v1]                 three pieces on each rank
    fsdp=2         [q0 q1 q2 q3]       [k0 k1 v0 v1]                     one
    fsdp=2,tp=2    [q0 q1]   [k0 | v0]   [q2 q3]   [k1 | v1]             one or two

Pieces of one layout tile each tensor exactly once, apart from copies, so that any layout reads files of any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parts.core.shard import Region


class IndexBox(NamedTuple):
    """A box of tensor elements: consecutive indices along each axis."""

    at: tuple[int, ...]
    """First index along each axis."""
    shape: tuple[int, ...]

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(first + length for first, length in zip(self.at, self.shape, strict=True))

    def meet(self, other: IndexBox) -> IndexBox | None:
        """Returns the intersection of two boxes; None if it is empty."""
        at = tuple(map(max, self.at, other.at))
        shape = tuple(min(one, two) - first for one, two, first in zip(self.end, other.end, at, strict=True))
        return IndexBox(at, shape) if all(length > 0 for length in shape) else None

    def within(self, other: IndexBox) -> tuple[slice, ...]:
        """Returns the slices that select this box in a tensor that holds the elements of box `other`."""
        pairs = zip(self.at, self.end, other.at, strict=True)
        return tuple(slice(first - zero, last - zero) for first, last, zero in pairs)


class Piece(NamedTuple):
    """A box of the tensor `name`, whose full shape is `whole`, and a view of this rank's elements in the box."""

    name: str
    box: IndexBox
    values: Tensor
    whole: tuple[int, ...]


class Place(NamedTuple):
    """Location of a rank's part in a tensor of shape `whole`: `regions`, one per matrix; the part stacks them by
    rows."""

    whole: tuple[int, ...]
    regions: list[Region]


Places = Mapping[str, Place]
"""Name -> location of this rank's part, for divided tensors only."""


def places_of(model: nn.Module) -> Places:
    """Returns {name: location} of the parameters that `parallel.tensor.divide` has cut; {} for an undivided model."""
    division: Any = getattr(model, "division", None)
    if division is None:
        return {}
    return {name: Place(tuple(division.shapes[name]), division.regions(name)) for name in division.cuts}


def pieces_of(name: str, tensor: Tensor, place: Place | None = None) -> list[Piece]:
    """Returns the pieces of the tensor `name` that this rank holds. `tensor` is the rank's part at `place`, for None
    the whole; either may be a DTensor, sharded further."""
    part = IndexBox((0,) * tensor.dim(), tuple(tensor.shape))
    held, values = _held(tensor.detach())
    if lies_whole(tensor, place):
        return [Piece(name, held, values, held.shape)]
    found, row = [], 0
    for region in [tuple(zip(part.at, part.end, strict=True))] if place is None else place.regions:
        at, shape = tuple(first for first, _ in region), tuple(last - first for first, last in region)
        inside = IndexBox((row, *part.at[1:])[: len(shape)], shape)
        if (box := inside.meet(held)) is not None:
            there = tuple(a + b - c for a, b, c in zip(at, box.at, inside.at, strict=True))
            found.append(Piece(name, IndexBox(there, box.shape), values[box.within(held)], whole_of(tensor, place)))
        row += shape[0] if shape else 0
    return found


def whole_of(tensor: Tensor, place: Place | None = None) -> tuple[int, ...]:
    """Returns the shape of the whole tensor, given its part `tensor` at `place`; for None `tensor` is the whole."""
    return tuple(tensor.shape) if place is None else place.whole


def lies_whole(tensor: Tensor, place: Place | None = None) -> bool:
    """Returns True if this rank holds all elements of the tensor, neither sharded as a DTensor nor cut at `place`."""
    return _held(tensor)[0].shape == tuple(tensor.shape) == whole_of(tensor, place)


def _held(tensor: Tensor) -> tuple[IndexBox, Tensor]:
    """Returns (box, elements) of a tensor on this rank; a DTensor's shards are divided as by `torch.chunk`."""
    at, shape = [0] * tensor.dim(), list(tensor.shape)
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return IndexBox(tuple(at), tuple(shape)), tensor
    for axis, (where, placement) in enumerate(zip(mesh.get_coordinate(), tensor.placements, strict=True)):  # type: ignore[attr-defined]
        if placement.is_shard():
            length = shape[placement.dim]
            first = min(length, where * -(-length // mesh.size(axis)))
            at[placement.dim] += first
            shape[placement.dim] = min(length - first, -(-length // mesh.size(axis)))
        elif not placement.is_replicate():
            raise TypeError(f"a tensor is placed as {placement}; pieces are of shards and copies")
    local = tensor.to_local()  # type: ignore[attr-defined]
    assert list(local.shape) == shape, (local.shape, shape)
    return IndexBox(tuple(at), tuple(shape)), local


@dataclass(frozen=True)
class Held:
    """Pieces of several tensors, a model's or an optimizer's, on this rank."""

    pieces: list[Piece]
    wholes: dict[str, tuple[int, ...]]
    """Name -> shape of the whole tensor."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Plain numbers by name, in addition to the tensors; equal on every rank that has them."""

    @classmethod
    def of_model(cls, model: nn.Module) -> Held:
        """Returns the pieces of a model's parameters and persistent buffers; the latter count as training state too."""
        return cls._of(model.state_dict(), places_of(model), {})

    @classmethod
    def of_optimizer(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
        """Returns the pieces of an optimizer's state, named STATE.PARAMETER (exp_avg.head.weight); plain numbers stay
        numbers, because a tensor would round them."""
        places = places_of(model)
        tensors: dict[str, Tensor] = {}
        cut: dict[str, Place] = {}
        numbers: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            place = places.get(name)
            for part, value in optimizer.state.get(parameter, {}).items():
                key, kind = f"{part}.{name}", f"{type(optimizer).__name__}.state[{name}][{part}]"
                if isinstance(value, Tensor):
                    tensors[key] = value
                    if value.dim() and value.shape != parameter.shape and not lies_whole(parameter, place):
                        raise TypeError(f"{kind} has another shape than the parameter, which is divided among ranks")
                    if place is not None and value.shape == parameter.shape:
                        cut[key] = place
                elif value is None or isinstance(value, (bool, int, float)):
                    numbers[key] = value
                else:
                    raise TypeError(f"{kind} is a {type(value).__name__}; a checkpoint holds tensors and numbers")
        return cls._of(tensors, cut, numbers)

    @classmethod
    def _of(cls, tensors: Mapping[str, Tensor], places: Places, numbers: dict[str, Any]) -> Held:
        pieces = [piece for name, value in tensors.items() for piece in pieces_of(name, value, places.get(name))]
        return cls(pieces, {name: whole_of(value, places.get(name)) for name, value in tensors.items()}, numbers)


def known_anywhere(names: Iterable[str], groups: ProcessGroups) -> set[str]:
    """Returns the union of the names on all ranks, because pipeline stages have different ones."""
    return set(names) if groups.sizes["pp"] == 1 else set().union(*groups.gather(list(names)))


def written_here(pieces: list[Piece], groups: ProcessGroups) -> list[Piece]:
    """Returns the pieces that this rank writes: of the ranks that hold a piece, exactly one writes it. Ranks exchange
    the keys of their pieces, so that no layout is assumed."""
    if groups.world == 1:
        return pieces
    own = [int.from_bytes(blake2b(f"{piece.name} {piece.box}".encode(), digest_size=8).digest()) for piece in pieces]
    holders: dict[int, list[int]] = {}
    for rank, keys in enumerate(groups.gather(own)):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    return [
        piece for piece, key in zip(pieces, own, strict=True) if holders[key][key % len(holders[key])] == groups.rank
    ]


def gap_or_overlap(boxes: Iterable[IndexBox], whole: tuple[int, ...]) -> str | None:
    """Returns a phrase that says why boxes do not tile a tensor of shape `whole` exactly once; None if they do."""
    everything, values = math.prod(whole), 0
    reached: list[IndexBox] = []
    for box in sorted(boxes):
        if len(box.at) != len(whole) or min(box.at, default=0) < 0 or any(map(int.__gt__, box.end, whole)):
            return f"has a piece of shape {box.shape} at {box.at}, which is not inside {whole}"
        reached = [other for other in reached if not whole or other.end[0] > box.at[0]]
        if any(other.meet(box) for other in reached):
            return f"has pieces that overlap at {box.at}"
        reached.append(box)
        values += box.values
    return None if values == everything else f"has pieces of {values:,} of its {everything:,} values"
