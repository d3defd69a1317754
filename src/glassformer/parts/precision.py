"""Where half precision is not enough."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in fp32 if it came in 16 bits, unchanged otherwise: for exponentials, means and sums."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
