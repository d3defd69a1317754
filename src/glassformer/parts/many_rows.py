"""Products of many rows x (n, i) with a matrix W (o, i), both in bf16, as `many_rows.cpp` computes them.

All tokens of a prompt are multiplied with a matrix at once, so arithmetic limits the speed, and a processor without
instructions for bf16 computes in fp32: 16 rows of W at a time are widened to fp32, and multiplied with all rows of x
while they are in the cache:

    y_no = sum_i x_ni W_oi, in the order of i

in fp32, each sum with one rounding for each term; y is rounded to bf16. A row has the same bits in any company and with
any number of threads.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from glassformer.machine import native
from glassformer.parts import few_rows
from glassformer.parts.precision import slow_in_bf16, traced

SOURCE = few_rows.SOURCE.with_name("many_rows.cpp")
FROM = 16
"""Least number of tokens of a text for which this product is used; fewer take torch's, which reads the matrix as it is
stored. The number of texts does not count, so that a row has the same bits in any company."""


@cache
def _call() -> Any:
    """Returns the compiled C++ function; None if the machine has no suitable instructions or no compiler."""
    name = few_rows.kernel()
    if not name:
        return None
    found = native.if_possible(SOURCE, name, "prompts are read by torch's slower products")
    if found is None:
        return None
    call: Any = found.product_of_many_rows
    call.argtypes, call.restype = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3, ctypes.c_int32
    return call


def serves(device: str) -> bool:
    """Returns True on a CPU that is slow in bf16 and for which the C++ is compiled; False while a compiler traces."""
    return device == "cpu" and not traced() and slow_in_bf16(device) and _call() is not None


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns y (n, o), the product of x (n, i) with W (o, i), all bf16. Raises MemoryError if the C++ cannot allocate
    its working memory."""
    x, weight = x.contiguous(), weight.contiguous()
    y = x.new_empty(len(x), len(weight))
    if _call()(x.data_ptr(), weight.data_ptr(), y.data_ptr(), *x.shape, len(weight)):
        raise MemoryError(f"a product of {len(x)} rows")
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Returns x W^T + b for x (b, s, i) and W (o, i) in bf16, computed by the C++; None if torch's product should
    compute it: for other dtypes, other shapes of x, few tokens s, or with gradients."""
    if traced() or torch.is_grad_enabled() or not x.dtype == weight.dtype == torch.bfloat16:
        return None
    if x.dim() != 3 or x.shape[1] < FROM or not serves(x.device.type):
        return None
    y = product(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def definition(x: Tensor, weight: Tensor) -> Tensor:
    """Returns y (n, o) bf16, the product of x (n, i) with W (o, i), by its definition with sums in fp64."""
    return (x.double() @ weight.double().T).bfloat16()
