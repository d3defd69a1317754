"""Products of one row, x (i,) with W (o, i), as a compiled step computes them.

One token reads every weight once, so what counts is that they are read in order, and that little is done to each:

float, 8 bits   sum_i W_oi x_i, written out: Inductor makes one loop over W as it lies in memory
8 and 4 bits    on processors with AVX512-VNNI, which multiplies 64 numbers of 8 bits at once (`one_row.cpp`): of each
                group g of 32 values, x ~ step_g q_g with q in 16 bits, which are two of 8, and

                    8 bits   y_o = s_o sum_g step_g (W_og . q_g)
                    4 bits   y_o = sum_g s_og step_g ((W_og - 8) . q_g) + z_og sum(x_g)

                where dots are sums of whole numbers and sum(x_g) is of x itself. Rounding x so moves y by less than
                rounding y to bf16 does.
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
    """Whether `one_row.cpp` runs here, and 4-bit matrices lie as it reads them."""
    return native.kernel() == "avx512vnni" and layout("cpu") == (64, True)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (1, i) -> q (groups, 32) whole numbers in fp64, step (groups, 1): x ~ step q."""
    groups = x.double().view(-1, GROUP)
    step = groups.abs().amax(1, keepdim=True) / MOST
    return (groups / step.clamp(min=torch.finfo(x.dtype).tiny)).round(), step


@library.custom_op("glassformer::row_of_8_bits", mutates_args=())
def row_of_8_bits(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """x (1, i) bf16, packed (o, i) int8, scales (o,) -> (1, o) bf16."""
    q, step = rounded(x)
    dots = (packed.double().view(len(packed), -1, GROUP) * q).sum(-1)
    return ((dots @ step)[:, 0] * scales.double()).bfloat16()[None]


@library.custom_op("glassformer::row_of_4_bits", mutates_args=())
def row_of_4_bits(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """x (1, i) bf16, packed as torch does for this processor, scales (groups, o, 2): s and z -> (1, o) bf16."""
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
    """What Inductor is to call for these operations: it writes `extern ...;` into a step's source for each text."""
    source = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")
    ops = torch.ops.glassformer
    return {ops.row_of_4_bits.default: ['"C" {\n' + source + "\n}"], ops.row_of_8_bits.default: []}  # both are in it


def products(vnni: bool) -> dict[Any, Callable[..., Tensor]]:
    """torch's operation -> what a step of one row computes instead."""
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
    x = force_stride_order(x, (1,))  # makes a tensor of it: else what made x is computed again for every row of W
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
