"""Plots of position encodings: numbers, which other code draws."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

MOST_POINTS = 1024


@dataclass(frozen=True)
class Plot:
    """Data of a plot of values (r, c) over `at` (c,): a line for each of the r names of `lines`; without lines, a
    colour map."""

    x: str
    y: str
    at: Int[Tensor, " c"]
    values: Float[Tensor, "r c"]
    lines: tuple[str, ...] = ()
    log: bool = False
    """True if the y axis is logarithmic."""


def some(length: int) -> Int[Tensor, " c"]:
    """Returns the positions at which an encoding is plotted for a text of `length` tokens: 0 .. length - 1, or, if
    these are many, integers from 1 at equal ratios."""
    if length <= MOST_POINTS:
        return torch.arange(length)
    spaced = torch.logspace(0, math.log2(length - 1), MOST_POINTS, base=2.0, dtype=torch.float64)
    return spaced.round().long().unique()


def by_distance(products: Float[Tensor, "c c"]) -> Float[Tensor, " c"]:
    """Returns the mean of a square matrix by distance, that is, along each diagonal: entry k is the mean over all pairs
    that are k apart."""
    return torch.stack([products.diagonal(k).mean() for k in range(len(products))])
