"""Products of few rows x (n, i) with matrices W (o, i) quantised to 4 or 8 bits, as `few_rows.cpp` computes them.

Decoding reads every weight for every token, so what counts is that they are read in order, and that little is done to
each. Of each group g of 32 values of a row, x ~ step_g q_g with q in 16 bits, |q| <= 127 * 256, and

    8 bits   y_o = s_o sum_g step_g (W_og . q_g)
    4 bits   y_o = sum_g s_og step_g ((W_og - 8) . q_g) + z_og sum(x_g)

where dots are sums of integers and sum(x_g) is a sum of unrounded values. This rounding of x changes y by less than
rounding y to bf16 does. The result for a row has the same bits in any batch and with any number of threads.

8 bits   packed (o/16, i/4, 16, 4) int8: 4 columns of 16 rows, one row after the other; scales (o,) bf16
4 bits   packed (o/16, i/8, 16, 4) uint8: of 16 rows and 8 columns, a byte holds columns c (low) and c + 4;
         scales (o/16, i/32, 16, 2) bf16: s and z
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, library

from glassformer.errors import WorkError
from glassformer.machine import native

SOURCE = Path(__file__).with_suffix(".cpp")
GROUP = 32
"""Number g of values of a row of x that share one step; in a 4-bit matrix also of values that share a scale s and a
middle z."""
ROWS = 16
"""Number of rows in one block of a packed matrix; o is a multiple of it."""
MOST = 127 * 256
"""Largest absolute value of the 16-bit integers q to which x is rounded; the upper 8 bits of q are then in
-127..127."""
LEAST = 2.0**-80
"""Lower bound on the largest absolute value of a group of x, so that the step of a group of zeros is not 0."""

SCHEMA = "(Tensor x, Tensor packed, Tensor scales) -> Tensor"
"""Signature of the operators in torch's notation, written out because torch cannot read it off functions whose shapes
are checked."""

Call = Callable[[int, int, int, int, int, int, int], None]
"""C++ function of (address of x, of packed, of scales, of y, n, i, o) that computes the product and writes it to y."""


@cache
def kernel() -> str:
    """Returns the name of the instruction set for which `few_rows.cpp` is compiled on this machine; empty if it cannot
    be compiled, or computes a wrong test product: torch then computes these products."""
    name = native.kernel()
    if name == native.NONE:
        return ""
    try:
        calls = _calls(name)
    except WorkError as problem:
        warnings.warn(f"matrices of 4 and 8 bits are multiplied by torch's slower products: {problem}")
        return ""
    for bits in calls:
        if not _right(bits, calls[bits]):
            warnings.warn(f"the products of {bits} bits that were compiled for {name} are wrong; torch's serve instead")
            return ""
    return name


@cache
def _calls(name: str) -> dict[int, Call]:
    found, calls = native.shared_object(SOURCE, name), {}
    for bits in (4, 8):
        call: Any = getattr(found, f"few_rows_of_{bits}_bits")
        call.argtypes, call.restype = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3, None
        calls[bits] = call
    return calls


def _right(bits: int, call: Call) -> bool:
    """Returns True if the compiled C++ function for matrices of `bits` bits agrees with the operator's Python
    definition on a small random product, within rounding."""
    draw = torch.Generator().manual_seed(bits)
    x = torch.randn(3, 2 * GROUP, generator=draw).bfloat16()
    if bits == 4:
        packed = torch.randint(256, (2, 2 * GROUP // 8, ROWS, 4), generator=draw, dtype=torch.uint8)
        scales = torch.rand(2, 2, ROWS, 2, generator=draw).bfloat16()
    else:
        packed = torch.randint(-127, 128, (2, 2 * GROUP // 4, ROWS, 4), generator=draw, dtype=torch.int8)
        scales = torch.rand(2 * ROWS, generator=draw).bfloat16()
    meant = DEFINITIONS[bits](x, packed, scales).float()
    return torch.allclose(_called(call, x, packed, scales).float(), meant, rtol=2**-7, atol=1e-2)


def _called(call: Call, x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    x, o = x.contiguous(), len(packed) * ROWS
    n, i = x.shape
    y = x.new_empty(n, o)
    call(x.data_ptr(), packed.data_ptr(), scales.data_ptr(), y.data_ptr(), n, i, o)
    return y


def product(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Returns y (n, o) bf16, the product of x (n, i) bf16 with a packed matrix of 4 or 8 bits. i must be a multiple of
    `GROUP`."""
    bits = 8 if packed.dtype == torch.int8 else 4
    if torch.compiler.is_compiling() or not kernel():
        op: Any = few_rows_of_4_bits if bits == 4 else few_rows_of_8_bits
        return op(x, packed, scales)
    return _called(_calls(kernel())[bits], x, packed, scales)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (q, step): x (n, i) rounded to integers q (n, groups, 32) in fp64, with one step per group, (n, groups,
    1), so that step q is near x."""
    groups = x.double().unflatten(-1, (-1, GROUP))
    step = groups.abs().amax(-1, keepdim=True).clamp(min=LEAST) / MOST
    return (groups / step).round(), step


@library.custom_op("glassformer::few_rows_of_8_bits", mutates_args=(), schema=SCHEMA)
def few_rows_of_8_bits(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Operator: returns y (n, o) bf16, the product of x (n, i) bf16 with an 8-bit matrix: packed and scales as
    the module's text shows them."""
    q, step = rounded(x)
    w = codes(packed, torch.float64).unflatten(1, (-1, GROUP))
    return (torch.einsum("ogk,ngk->ngo", w, q * step).sum(1) * scales.double()).bfloat16()


@library.custom_op("glassformer::few_rows_of_4_bits", mutates_args=(), schema=SCHEMA)
def few_rows_of_4_bits(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Operator: returns y (n, o) bf16, the product of x (n, i) bf16 with a 4-bit matrix: packed and scales in blocks as
    the module's text shows them."""
    q, step = rounded(x)
    w = codes(packed, torch.float64).unflatten(1, (-1, GROUP))
    s, z = (part.flatten(0, 1) for part in scales.double().transpose(1, 2).unbind(-1))
    dots = torch.einsum("ogk,ngk->nog", w, q * step)
    return (s * dots + z * x.double().unflatten(-1, (-1, GROUP)).sum(-1)[:, None]).sum(-1).bfloat16()


DEFINITIONS: dict[int, Callable[[Tensor, Tensor, Tensor], Tensor]] = {4: few_rows_of_4_bits, 8: few_rows_of_8_bits}
"""Mapping {number of bits: the operator}; the operator's Python code computes in fp64, and a compiled step calls the
C++ instead."""


def _shape(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], len(packed) * ROWS)


few_rows_of_4_bits.register_fake(_shape)
few_rows_of_8_bits.register_fake(_shape)


def blocks(q: Tensor) -> Tensor:
    """Returns the packed matrix of integers q (o, i): in 8 bits (o/16, i/4, 16, 4) of int8, otherwise in 4 bits (o/16,
    i/8, 16, 4) of integers in 0..15. o must be a multiple of `ROWS`, i of 8."""
    fours = q.view(-1, ROWS, q.shape[1] // 4, 4).transpose(1, 2)
    if q.dtype == torch.int8:
        return fours.contiguous()
    return (fours[:, ::2] | fours[:, 1::2] << 4).to(torch.uint8).contiguous()


def codes(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the integers of a packed matrix as (o, i) in `dtype`; those of a 4-bit matrix minus 8, in -8..7."""
    if packed.dtype == torch.int8:
        return packed.transpose(1, 2).reshape(len(packed) * ROWS, -1).to(dtype)
    both = torch.stack((packed & 15, packed >> 4), 3).transpose(1, 2)
    return both.reshape(len(packed) * ROWS, -1).view(torch.int8).sub(8).to(dtype)


def shims() -> dict[Any, list[str]]:
    """Returns {operator: C++ source} with the code that Inductor calls for these operators in compiled steps; Inductor
    writes `extern ...;` for each text."""
    ops, source = torch.ops.glassformer, SOURCE.read_text(encoding="utf-8")
    source = source.replace('#include "neon.h"', SOURCE.with_name("neon.h").read_text(encoding="utf-8"))
    switches = [one[2:].replace("=", " ") for one in native.KERNELS[kernel()].options if one.startswith("-D")]
    how = "\n".join(f"#define {one}" for one in switches)
    said = f"#define IN_A_STEP\n{how}\n{source}"
    return {ops.few_rows_of_4_bits.default: ['"C" {\n' + said + "\n}"], ops.few_rows_of_8_bits.default: []}
