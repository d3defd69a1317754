"""Where half precision is not enough, and where it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in fp32 if it came in 16 bits, unchanged otherwise: for exponentials, means and sums."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def exact(x: Tensor) -> Tensor:
    """x in fp64; on the CPU where its device has none (MPS)."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products of x run in: autocast's, where it is on."""
    kind = x.device.type
    known = torch.amp.is_autocast_available(kind)  # not on the meta device
    return torch.get_autocast_dtype(kind) if known and torch.is_autocast_enabled(kind) else x.dtype


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Inside, autocast leaves the products of x alone."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


LONGEST_ALONE = 1024


def as_among_others(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """product(x), x (..., i), with the bits that a row has beside other rows: oneDNN adds up a row of more than
    `LONGEST_ALONE` numbers of 16 bits in another order where it is the only one. Two take as long as one."""
    half = x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu"
    if not half or x.shape[-1] <= LONGEST_ALONE or torch.compiler.is_compiling() or x.numel() != x.shape[-1]:
        return product(x)
    return product(x.reshape(1, -1).expand(2, -1))[:1].view(*x.shape[:-1], -1)


@cache
def onednn_in_bf16(device: str = "cpu") -> bool:
    """Whether torch has oneDNN's products in bf16 for this processor."""
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return device == "cpu" and known and torch.ops.mkldnn._is_mkldnn_bf16_supported()
