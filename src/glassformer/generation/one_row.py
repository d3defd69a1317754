"""Products of one row, x (i,) with W (o, i), as a compiled step computes them: sum_i W_oi x_i as a formula.

One token reads every weight once, so speed depends on reading weights in order, and on few operations for each. Of the
formula Inductor makes one loop over W in the order of memory. Matrices of 8 and 4 bits that are packed for our own
product are multiplied by it (`parts/few_rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glassformer.parts.precision import wide


def products() -> dict[Any, Callable[..., Tensor]]:
    """Returns the decompositions of a step of one row: torch's operation -> the function computed instead."""
    aten = torch.ops.aten
    return {aten.linear.default: _linear, aten._weight_int8pack_mm.default: _weight_int8pack_mm}


def _product(weight: Tensor, x: Tensor) -> Tensor:
    from torch._inductor.inductor_prims import force_stride_order  # takes a second to import

    x = wide(x.reshape(-1))
    x = force_stride_order(x, (1,))  # materialises x, which would otherwise be recomputed for every row of W
    return (wide(weight) * x).sum(-1)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.numel() != x.shape[-1]:
        return NotImplemented
    y = _product(weight, x)
    return (y if bias is None else y + wide(bias)).to(x.dtype).view(*x.shape[:-1], -1)


def _weight_int8pack_mm(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    if len(x) > 1:
        return NotImplemented
    return (_product(packed, x) * wide(scales)).to(x.dtype)[None]
