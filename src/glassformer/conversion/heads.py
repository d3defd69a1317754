"""Weights for another number of KV heads: MHA -> GQA -> MQA (Ainslie et al. 2023, 2305.13245, section 2.1).

A new head serves a group of query heads, and is made from the old heads that served this group.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from glassformer.dynamics.weights import named_matrices
from glassformer.model import Model
from glassformer.parts.linear import Matrix

OfHeads = Callable[[Tensor, Tensor], Tensor]
"""Function of (old heads of each group (g, m, h, ...), initialised new heads (g, h, ...)) to new heads (g, h, ...)."""
Part = tuple[Matrix | None, Matrix, bool]
"""(linear layer of the old model, None if it lacks one; the same layer of the new model; True for keys and values)."""


def mean(heads: Tensor, drawn: Tensor) -> Tensor:
    """Returns new heads (g, h, ...): the mean over the m old heads of each group in `heads` (g, m, h, ...), the best
    choice in Ainslie et al. 2023; `drawn` is ignored."""
    return heads.mean(1)


def first(heads: Tensor, drawn: Tensor) -> Tensor:
    """Returns new heads (g, h, ...): the first old head of each group in `heads` (g, m, h, ...); `drawn` is ignored."""
    return heads[:, 0]


def new(heads: Tensor, drawn: Tensor) -> Tensor:
    """Returns the newly initialised heads `drawn` (g, h, ...), regardless of the old ones."""
    return drawn


def regrouped(old: Tensor, drawn: Tensor, how: OfHeads = mean) -> Tensor:
    """Returns key or value weights (g, h, ...) regrouped for the number of heads of `drawn` (g', h, ...).

    With mean and g' | g, W'_j = g'/g * the sum of W_i over the g/g' heads of group j. If g | g', heads are repeated,
    and the model computes the same."""
    every = math.lcm(len(old), len(drawn))  # divides the number of query heads, as both do
    return how(old.repeat_interleave(every // len(old), 0).unflatten(0, (len(drawn), -1)), drawn)


@torch.no_grad()
def regroup(old: Model, model: Model, how: OfHeads = mean) -> dict[str, Tensor]:
    """Returns {name: value} of the parameters of `model` whose keys or values have another number of heads than in
    `old`: those heads are made by `how`, other rows copied. Parameters with a part that cannot be converted are
    omitted."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    maps = named_matrices(old)
    wholes: dict[int, list[Part]] = {}
    for name, matrix in named_matrices(model).items():
        part = (maps.get(name), matrix, name.endswith((".mixer.k", ".mixer.v")))
        wholes.setdefault(id(matrix.parameter), []).append(part)
    found: dict[str, Tensor] = {}
    for parts in wholes.values():
        if any(grouped and was is not None and was.heads != is_.heads for was, is_, grouped in parts):
            for leaf in ("parameter", "bias"):
                target = getattr(parts[0][1], leaf)
                if target is not None and (value := _stacked(parts, leaf, how)) is not None:
                    found[names[id(target)]] = value
    return found


def _stacked(parts: list[Part], leaf: str, how: OfHeads) -> Tensor | None:
    """Returns a new model's parameter (`leaf`: "parameter" or "bias"), filled part by part from the old model; None if
    a part has no source, or one whose shape does not fit."""
    value: Tensor = getattr(parts[0][1], leaf).detach().clone()
    for one, other, grouped in parts:
        given = None if one is None else getattr(one, leaf)
        if one is None or given is None:
            return None
        old, place = one.within(given.detach()), other.within(value)
        if old.shape == place.shape:
            place.copy_(old)
        elif grouped and old.shape[1:] == place.shape[1:]:
            place.copy_(regrouped(old, place.clone(), how))
        else:
            return None
    return value
