"""Products of one row, x (i,) with W (o, i), as a compiled step computes them.

One token reads every weight once, so speed depends on reading weights in order, and on few operations for each:

float, 8 bits   sum_i W_oi x_i as a formula: Inductor makes one loop over W in the order of memory
8 and 4 bits    on processors with AVX512-VNNI, which multiplies 64 integers of 8 bits at once (`one_row.cpp`): in each
                group g of 32 elements, x ~ step_g q_g with q in 16 bits, split into two of 8, and

                    8 bits   y_o = s_o sum_g step_g (W_og . q_g)
                    4 bits   y_o = sum_g s_og step_g ((W_og - 8) . q_g) + z_og sum(x_g)

                where dots are sums of integers and sum(x_g) is over x before rounding. Rounding x so changes y by
                less than rounding y to bf16 does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, library

from glassformer.machine import native
from glassformer.parts.precision import wide
from glassformer.parts.quantized import GROUP, codes, layout

MOST = 127 * 256
"""The largest q: its upper 8 bits are -127..127."""


@cache
def has_vnni() -> bool:
    """Returns True if `one_row.cpp` runs here, and torch packs 4-bit matrices in the layout that it reads."""
    return native.kernel() == "avx512vnni" and layout("cpu") == (64, True)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns q (groups, 32), integers in fp64, and step (groups, 1), for x (1, i) ~ step q."""
    groups = x.double().view(-1, GROUP)
    step = groups.abs().amax(1, keepdim=True) / MOST
    return (groups / step.clamp(min=torch.finfo(x.dtype).tiny)).round(), step


@library.custom_op("glassformer::row_of_8_bits", mutates_args=())
def row_of_8_bits(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Returns the product (1, o) bf16 of x (1, i) bf16 with `packed` (o, i) int8 times `scales` (o,)."""
    q, step = rounded(x)
    dots = (packed.double().view(len(packed), -1, GROUP) * q).sum(-1)
    return ((dots @ step)[:, 0] * scales.double()).bfloat16()[None]


@library.custom_op("glassformer::row_of_4_bits", mutates_args=())
def row_of_4_bits(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Returns the product (1, o) bf16 of x (1, i) bf16 with 4-bit weights, packed as torch does for this processor;
    `scales` (groups, o, 2) holds s and z."""
    q, step = rounded(x)
    found = layout("cpu")
    assert found is not None
    w = codes(packed, x.shape[1], found, torch.float64).view(-1, GROUP, scales.shape[1])
    s, z = scales.double().unbind(-1)
    sums = x.double().view(-1, GROUP).sum(1, keepdim=True)
    return (s * step * (w * q[..., None]).sum(1) + z * sums).sum(0).bfloat16()[None]


@row_of_8_bits.register_fake
def _(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty(1, scales.shape[0])


@row_of_4_bits.register_fake
def _(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty(1, scales.shape[1])


def shims() -> dict[Any, list[str]]:
    """Returns the C++ that Inductor calls for each operation; it writes `extern TEXT;` into a step's source."""
    source = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")
    ops = torch.ops.glassformer
    return {ops.row_of_4_bits.default: ['"C" {\n' + source + "\n}"], ops.row_of_8_bits.default: []}  # first has both


def products(vnni: bool) -> dict[Any, Callable[..., Tensor]]:
    """Returns the decompositions of a step of one row: torch's operation -> the function computed instead."""
    aten = torch.ops.aten
    found: dict[Any, Callable[..., Tensor]] = {
        aten.linear.default: _linear,
        aten._weight_int8pack_mm.default: _weight_int8pack_mm,
    }
    if vnni:
        found[aten._weight_int8pack_mm.default] = _vnni_int8
        found[aten._weight_int4pack_mm_for_cpu.default] = _vnni_int4
    return found


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


def _vnni_int8(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return NotImplemented if len(x) > 1 else torch.ops.glassformer.row_of_8_bits(x, packed, scales)


def _vnni_int4(x: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
    return NotImplemented if len(x) > 1 else torch.ops.glassformer.row_of_4_bits(x, packed, scales)
