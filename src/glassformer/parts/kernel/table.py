"""Which kernel was fastest, by measurement: `glassformer bench kernels` prints these rows anew.

Forward and backward of one layer, milliseconds, 2 cores; docs/log.md says when and on what machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glassformer.parts.visibility import SameDocument, Visibility

# CPU: from this many queries the tiled SDPA kernel beats explicit products over causal blocks.
CPU_SDPA_FROM = {torch.float32: 1024, torch.bfloat16: 2048}
# CPU: below this many queries a call is decoding or tiny, and blocks only cost.
CPU_BLOCKS_FROM = 2


def fastest(q: Tensor, k: Tensor, visibility: Visibility, additive: bool) -> str:
    """Name of the kernel for these shapes; q (b, s, n, h), k (b, t, g, h)."""
    s, t = q.shape[1], k.shape[1]
    if q.device.type != "cpu":
        return "sdpa" if additive else "banded"
    if s < CPU_BLOCKS_FROM:
        return "sdpa" if additive else "banded"
    windowed = visibility.reach is not None and visibility.reach < t // 2
    plain = not isinstance(visibility, SameDocument) and not windowed
    if additive and plain and s >= CPU_SDPA_FROM.get(q.dtype, 1024):
        return "sdpa"
    return "banded"
