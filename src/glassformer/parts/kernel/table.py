"""Which kernel was fastest, by measurement: `glassformer bench kernels` prints the rows behind it, docs/benchmarks/
kernels.md keeps them."""

from __future__ import annotations

import torch
from torch import Tensor

from glassformer.parts.visibility import Visibility

# CPU, forward and backward: numbers of queries s for which blocks beat SDPA, from <= s < to. Under a window they go on
# winning. From 8192 the patterns that blocks keep for the backward pass outgrow what speed is worth. At 2048 in fp32
# they win by 7 % on one processor and lose by 6 % on another (docs/log.md).
CPU_BANDED = {torch.float32: (256, 4096), torch.bfloat16: (2, 8192)}
CPU_BANDED_OTHER = (256, 4096)


CPU_DIRECT = 4
"""CPU, forward alone: as many queries after others are better served by two products, but for one row in fp32 without a
mask. How many keys there are does not matter: a row of a batch may meet more of them than it does alone."""


def fastest(q: Tensor, k: Tensor, visibility: Visibility, additive: bool, plain: bool = True) -> str:
    """Name of the kernel for these shapes; q (b, s, n, h), k (b, t, g, h). SDPA cannot bend scores, blocks can.

    `plain`: no bias, and the keys are the last t tokens."""
    goes_on = q.shape[1] < k.shape[1] or q.shape[1] == 1
    if q.device.type == "cpu" and q.shape[1] <= CPU_DIRECT and goes_on:
        alone = q.shape[0] == 1 and q.dtype == torch.float32 and plain and k.shape[1] < 1024
        return "sdpa" if alone else "direct"
    if not additive:
        return "banded"
    if q.device.type != "cpu":
        return "sdpa"
    s, t = q.shape[1], k.shape[1]
    first, last = CPU_BANDED.get(q.dtype, CPU_BANDED_OTHER)
    windowed = visibility.reach is not None and visibility.reach <= t // 2
    return "banded" if first <= s and (s < last or windowed) else "sdpa"
