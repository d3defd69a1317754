"""Precision of computations, and properties of device and compiler that several parts read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.machine.device import bf16_gain

SLOW = 0.8
"""Ratio of the speed of bf16 matmuls to that of fp32 matmuls (`bf16_gain`) below which matmuls of many bf16 rows are
computed in fp32."""


def wide(x: Tensor) -> Tensor:
    """Returns x in fp32 if it is in 16 bits, unchanged otherwise: for exponentials, means and sums."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def traced() -> bool:
    """Returns True while a compiler of torch traces the code."""
    return torch.compiler.is_compiling()


def at_hand(x: Tensor) -> bool:
    """Returns True if the values of x can be read without waiting: on a CPU, while no compiler traces."""
    return x.device.type == "cpu" and not traced()


WITHOUT_FP64 = {"mps"}
"""Types of devices without fp64."""


def exact_device(device: torch.device | str) -> torch.device:
    """Returns the device, or the CPU if the device has no fp64."""
    device = torch.device(device)
    return torch.device("cpu") if device.type in WITHOUT_FP64 else device


def exact(x: Tensor) -> Tensor:
    """Returns x in fp64, moved to the CPU if its device has no fp64."""
    return x.to(exact_device(x.device)).double()


def finest_dtype(x: Tensor) -> torch.dtype:
    """Returns fp64, or the dtype of x if its device has no fp64."""
    return x.dtype if x.device.type in WITHOUT_FP64 else torch.float64


WITH_RECURRENCES = {"cpu", "cuda", "mps", "xpu", "meta"}
"""Types of devices on which torch has whole LSTMs and GRUs; elsewhere their equations run token by token."""


def has_recurrences(x: Tensor) -> bool:
    """Returns True if torch has whole LSTMs and GRUs on the device of x."""
    return x.device.type in WITH_RECURRENCES


WITHOUT_AUTOCAST = {"meta"}
"""Types of devices without autocast. `torch.amp` knows them too, but torch 2.11 cannot trace the question."""


def product_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which torch computes matmuls of x: autocast's if it is on, otherwise that of x."""
    kind = x.device.type
    on = kind not in WITHOUT_AUTOCAST and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else x.dtype


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Returns a context manager in which autocast is off on the device of x."""
    kind = x.device.type
    return nullcontext() if kind in WITHOUT_AUTOCAST else torch.autocast(kind, enabled=False)


LONGEST_ALONE = 1024


def as_among_others(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Computes product(x), for x (..., i), so that a single row has the same bits as that row in a batch. oneDNN adds
    up a single row of more than `LONGEST_ALONE` elements of 16 bits in another order, so such a row is passed twice,
    which takes no longer."""
    half = x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu"
    if not half or x.shape[-1] <= LONGEST_ALONE or torch.compiler.is_compiling() or x.numel() != x.shape[-1]:
        return product(x)
    return product(x.reshape(1, -1).expand(2, -1))[:1].view(*x.shape[:-1], -1)


def rowwise_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x W^T in fp32 or wider, x (..., i), W (o, i), with the same bits for a row in any batch.

    On CPUs the order of a sum in fp32 depends on the number of rows, so sums are in fp64 on CPUs, except while
    gradients are recorded: in training no row is compared with another batch's."""
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return F.linear(x, weight)
    return F.linear(x.double(), weight.double()).to(x.dtype)


@cache
def onednn_in_bf16(device: str = "cpu") -> bool:
    """Returns True if torch has oneDNN's matmuls in bf16 for this processor."""
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return device == "cpu" and known and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def packs_bf16(device: str = "cpu") -> bool:
    """Returns True if oneDNN should pack weights in bf16 for a CPU: if its matmuls of many rows are not slow there.
    Elsewhere plain weights are faster, because native instructions of a decoding step read them."""
    return onednn_in_bf16(device) and not slow_in_bf16(device)


def slow_in_bf16(device: str) -> bool:
    """Returns True if matmuls of many bf16 rows are faster in fp32, as they are without oneDNN's in bf16; False while
    a compiler traces, because nothing can be measured then."""
    return device == "cpu" and not torch.compiler.is_compiling() and (not onednn_in_bf16() or bf16_gain() < SLOW)
