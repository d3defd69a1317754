"""Memory of decode states, which a CPU allocates as it is written."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

LEAST_MAPPED = 1 << 20
"""Least number of bytes of a tensor that is a separate mapping of pages."""


def unused(shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> Tensor:
    """Returns a tensor of zeros whose memory a CPU allocates page by page as it is written.

    Small tensors, and those on other devices, are allocated at once."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LEAST_MAPPED or torch.device(device or "cpu").type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page holds thousands of tokens
        with suppress(OSError):  # a kernel without huge pages refuses the advice
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)
