"""A map of sequences, written down as a transformer on a grid."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import torch
from torch import Tensor

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, sampled

TOKENS, GRIDS, DRAWS, SEQUENCES = 3, (4, 8, 16), 8, 512
SHARP = 1e6
"""Slope of a step made of two ReLUs: what lies within 1 / SHARP of a border of the grid is lost."""


def target(x: Tensor) -> Tensor:
    """(b, n) -> (b, n): a continuous map in which every token matters to every other."""
    largest = x.max(-1, keepdim=True).values
    return torch.sin(3 * x * largest) + (x - x.mean(-1, keepdim=True)).abs()


def steps(z: Tensor) -> Tensor:
    """1 where z > 0, else 0, but for a narrow slope: relu(c z + 1) - relu(c z), two ReLUs."""
    return (SHARP * z + 1).relu() - (SHARP * z).relu()


def transformer(x: Tensor, grid: int) -> Tensor:
    """(b, n) -> (b, n): network, attention, network, all of whose weights are functions of `target`.

    The first network finds the cell of each token, and multiplies its number by the power of the grid that belongs to
    its position: it has a ReLU pair for every border and position. Attention with queries of zero, the mean over
    tokens, makes one number of these, which no other sequence of cells has (the contextual mapping). The second
    network has a pair for every such number and position, and adds up the differences of the values from one to the
    next."""
    n = x.shape[-1]
    position = torch.eye(n, dtype=x.dtype)
    borders = torch.arange(1, grid, dtype=x.dtype) / grid
    # z (b, n, p, k) > 0 where token i stands at position p and lies beyond border k
    z = x[..., None, None] - borders + 2 * (position[None, :, :, None] - 1)
    powers = torch.tensor([float(grid**p) for p in range(n)], dtype=x.dtype)
    code = (steps(z).sum(-1) * powers).sum(-1)  # (b, n)
    scores = torch.zeros(n, n, dtype=x.dtype)  # queries of zero
    number = torch.einsum("st,bt->bs", scores.softmax(-1), code) * n
    cells = torch.tensor([cell[::-1] for cell in product(range(grid), repeat=n)], dtype=x.dtype)
    values = target((cells + 0.5) / grid)  # (grid^n, n), in the order of their numbers
    rises = values.diff(dim=0)
    middles = torch.arange(1, len(values), dtype=x.dtype) - 0.5
    return values[0] + torch.einsum("bsm,ms->bs", steps(number[..., None] - middles), rises)


def measure(bench: Bench) -> Outcome:
    grids = GRIDS[: bench.scaled(3, 2)]
    errors: dict[int, list[float]] = {grid: [] for grid in grids}
    for seed in range(bench.scaled(DRAWS, 2)):
        made = torch.Generator().manual_seed(seed)
        x = torch.rand(bench.scaled(SEQUENCES, 16), TOKENS, generator=made, dtype=torch.float64)
        for grid in grids:
            errors[grid].append(float((transformer(x, grid) - target(x)).square().mean().sqrt()))
    logs = np.log([list(of) for of in errors.values()])
    slopes = np.polyfit(np.log(grids), logs, 1)[0]
    half = [b / a for a, b in zip(errors[grids[-2]], errors[grids[-1]], strict=True)]
    figures = [
        sampled("slope of log error in log cells", list(slopes), least=-1.25, most=-0.75),
        sampled("error with twice as many cells a token, over that before", half, most=1 / math.sqrt(2)),
        *(sampled(f"error with {grid} cells a token", errors[grid]) for grid in grids),
    ]  # fmt: skip
    return Outcome(
        figures=tuple(figures), size=f"sequences of {TOKENS} numbers from 0 to 1, fp64",
        sure=f"{len(half)} draws of {len(x)} sequences, intervals of 95 %",
        notes=(f"The price is the proof's: the second network has {TOKENS} G^{TOKENS} pairs of ReLUs for G cells.",),
    )  # fmt: skip


CLAIM = Claim(
    name="universal-approximation",
    statement="A transformer comes as near as one likes to a continuous map of sequences: written down on a grid, its "
    "error falls as the cells get smaller.",
    source="1912.10077, theorem 3",
    published="any error above 0, with enough width or depth",
    kind="measured",
    size="any",
    minutes=0.1,
    measure=measure,
)
