"""Tables of numbers for a page: each number in words, with the shade of its size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from glassformer.lens.arithmetic import say

LEVELS = 6
"""Shades of a positive and of a negative number."""


def number_table(x: Tensor, rows: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """Returns x (rows, columns) as `{"rows", "columns", "texts", "levels"}`: numbers in words, and the shade of each,
    0 to LEVELS for the largest one, negative for a negative one; an infinite number has shade 0.

    Raises RuntimeError for an empty x."""
    finite = x.where(x.isfinite(), torch.zeros_like(x))
    top = max(float(finite.abs().max()), 1e-12)
    levels = (finite * (LEVELS / top)).round().int().tolist()
    texts = [[say(one) for one in row] for row in x.tolist()]
    return {"rows": list(rows), "columns": list(columns), "texts": texts, "levels": levels}
