"""Which kernel was fastest, by measurement: `glassformer bench kernels` prints the rows behind it, docs/benchmarks/
kernels.md keeps them."""

from __future__ import annotations

import torch
from torch import Tensor

from glassformer.parts.visibility import Visibility

# CPU, forward and backward: numbers of queries s for which blocks beat SDPA, from <= s < to. Under a window they go on
# winning. From 8192 the patterns that blocks keep for the backward pass outgrow what speed is worth.
CPU_BANDED = {torch.float32: (256, 4096), torch.bfloat16: (2, 8192)}
CPU_BANDED_OTHER = (256, 4096)


def fastest(q: Tensor, k: Tensor, visibility: Visibility, additive: bool) -> str:
    """Name of the kernel for these shapes; q (b, s, n, h), k (b, t, g, h). SDPA cannot bend scores, blocks can."""
    if not additive:
        return "banded"
    if q.device.type != "cpu":
        return "sdpa"
    s, t = q.shape[1], k.shape[1]
    first, last = CPU_BANDED.get(q.dtype, CPU_BANDED_OTHER)
    windowed = visibility.reach is not None and visibility.reach <= t // 2
    return "banded" if first <= s and (s < last or windowed) else "sdpa"
