"""Weights of other numbers of key/value heads: MHA -> GQA -> MQA (Ainslie et al. 2023, 2305.13245, section 2.1).

A new head stands in for a group of query heads, and is made of the heads that those read before.
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
"""(heads of each group (g, m, h, ...), new heads as they are drawn (g, h, ...)) -> new heads (g, h, ...)"""
Part = tuple[Matrix | None, Matrix, bool]
"""A map of the old model and of the new one, and whether it makes keys or values."""


def mean(heads: Tensor, drawn: Tensor) -> Tensor:
    """The mean of a group's heads, of which the paper's models recover best."""
    return heads.mean(1)


def first(heads: Tensor, drawn: Tensor) -> Tensor:
    """The first head of each group."""
    return heads[:, 0]


def new(heads: Tensor, drawn: Tensor) -> Tensor:
    """New heads, as in a model that is not trained."""
    return drawn


def regrouped(old: Tensor, drawn: Tensor, how: OfHeads = mean) -> Tensor:
    """Key or value weights (g, h, ...) for as many heads as `drawn` (g', h, ...) has.

    With mean and g' | g, W'_j = g'/g * the sum of W_i over the g/g' heads of group j. Where g | g', heads are repeated,
    and the model computes the same."""
    every = math.lcm(len(old), len(drawn))  # divides the number of query heads, as both do
    return how(old.repeat_interleave(every // len(old), 0).unflatten(0, (len(drawn), -1)), drawn)


@torch.no_grad()
def regroup(old: Model, model: Model, how: OfHeads = mean) -> dict[str, Tensor]:
    """Parameters of `model`, by name, whose keys or values have other numbers of heads than in `old`: made of those,
    and all else in the same parameter taken over. Parameters of which a part would fit nowhere are left out."""
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
    """One parameter of the maps stacked in it; None where one of them has nothing to be made of."""
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
