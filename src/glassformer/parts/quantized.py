"""Quantised linear layers: matrices packed in 16, 8 or 4 bits for decoding, which reads every weight for every token,
so that its time is that of reading bytes in order.

bf16   w, in the blocks of oneDNN's bf16 matmuls; only on CPUs
int8   w = q s, q in -127..127: a scale for each row (output); torch's `_weight_int8pack_mm`
int4   w = (q - 8) s + z, q in 0..15: a scale and a middle for each group of 32 values of a row, from the group's
       smallest and largest value, which is the grid of GGUF's Q4_1; torch's `_weight_int4pack_mm`

Weights are rounded to the nearest of these values, with s and z in bf16; matmuls run in bf16 and add up in fp32. A few
tokens at a time are multiplied with the packed matrix of 8 or 4 bits: by the C++ of `few_rows.py` on processors for
which it is compiled, otherwise by torch. For many tokens (a prompt) that C++ serves too, unless the processor has units
for bf16; there, and without the C++, the matrix is unpacked, a piece at a time, for an ordinary matmul. Packed weights
cannot be trained.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.machine.device import bf16_gain
from glassformer.parts import few_rows
from glassformer.parts.linear import Linear
from glassformer.parts.memory import in_huge_pages
from glassformer.parts.precision import as_among_others, onednn_in_bf16, slow_in_bf16

GROUP = few_rows.GROUP
"""Multiple to which the number of columns is padded, because torch's packed matmuls otherwise read past the end of a
row."""
BLOCK = 64
"""Multiple to which the number of rows of a 4-bit matrix is padded: the most rows that torch lays out together."""
PIECE = 1 << 19
"""Number of values that are packed at once, through fp32, so that they stay in the cache; four times this number is
unpacked at once."""
OF_SLOW_BF16 = 64
"""Largest number of rows that a processor that is slow in bf16 multiplies with a prepacked bf16 matrix; for more rows
it computes in fp32."""
OF_OUR_OWN, WITH_UNITS = 64, 3.0
"""Largest number of rows that are multiplied with a packed matrix of 8 or 4 bits by the C++ of `few_rows.py` where
bf16 matmuls are more than `WITH_UNITS` times faster than those in fp32; for more rows the matrix is unpacked there."""
LARGE, CHUNK, ALIGNED = 1 << 23, 1 << 25, 64
"""Least number of values of a model whose matrices share memory; bytes of one piece of it; alignment in bytes."""
TINY = 1e-30
UNTRAINED = "packed weights cannot be trained; load the model without quantize"


def no_bf16() -> RequestError:
    """Returns the error that refuses prepacked bf16 weights on a device that cannot multiply them."""
    return RequestError(
        "quantize='bf16' is for CPUs on which torch has oneDNN's products in bf16; leave quantize out",
        code="unsupported", field="quantize", value="bf16",
    )  # fmt: skip


class QuantizedLinear(Linear):
    """Base of linear layers whose W (o, i) is packed; the result has the dtype of x.

    `few`: largest number of tokens that are multiplied with the packed matrix instead of an unpacked one. The packed
    matmul cannot use units for bf16: on Zen 4 the two take the same time at 20 tokens in 8 bits, and at 50 in 4."""

    bits: int
    few: int
    own = False
    """True if the matrix is packed in the layout of the C++ of `few_rows.py`, False for torch's layout."""
    of_head = "int8"
    """Kind of packing of the head, by default, in a model whose layers are of this class."""
    packed: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, outs: tuple[int, ...]):
        nn.Module.__init__(self)
        (self.rows, self.in_features), self.outs = weight.shape, outs
        self.roles, self.reparam = (), None
        self.missing = -self.in_features % GROUP
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.slow = slow_in_bf16(weight.device.type)
        self.hold(weight.detach())

    def hold(self, weight: Tensor) -> None:
        for name, tensor in zip(("packed", "scales"), self.pack(weight), strict=True):
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            raise RequestError(UNTRAINED, code="unsupported", field="quantize")
        rows = x.reshape(-1, self.in_features).bfloat16()
        y = self.product_of_few(rows) if rows.shape[0] <= self.few else self.product_of_many(rows)
        y = y.reshape(*x.shape[:-1], self.rows).to(x.dtype)
        return y if self.bias is None else y + self.bias

    def product_of_few(self, x: Tensor) -> Tensor:
        return self.product(F.pad(x, (0, self.missing)) if self.missing else x)

    def product(self, x: Tensor) -> Tensor:
        """Returns x W^T (n, o) bf16 for x (n, i) bf16, i padded to whole groups, by the matmul with the packed
        matrix."""
        raise NotImplementedError

    def product_of_many(self, x: Tensor) -> Tensor:
        dtype = torch.float32 if self.slow else x.dtype
        many, y = x.to(dtype), x.new_empty(x.shape[0], self.rows, dtype=dtype)
        for rows in _pieces(self.rows, self.in_features, 4 * PIECE):
            torch.mm(many, self.unpacked(dtype, rows).T, out=y[:, rows])
        return y.to(x.dtype)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Rounded values of W (o, i) that the packed numbers represent, in fp32."""
        return self.unpacked(torch.float32, slice(0, self.rows))

    @property
    def operand(self) -> Tensor | None:
        return None

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (packed, scales) of a matrix W (o, i): the packed integers and the scales of rows or groups."""
        raise NotImplementedError

    def unpacked(self, dtype: torch.dtype, rows: slice) -> Tensor:
        """Returns the rows `rows` of W, unpacked to `dtype`; the first row must be a multiple of `BLOCK`."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> QuantizedLinear:
        if mode:
            raise RequestError(UNTRAINED, code="unsupported", field="quantize")
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Applies a change of dtype only to the bias. Raises RequestError for a move to another type of device, which
        would need another layout of the packed numbers."""
        before, scales = self.packed.device.type, self.scales
        super()._apply(fn, recurse)
        if (here := self.packed.device.type) != before:
            raise RequestError(
                f"weights of {self.bits} bits were packed for {before}; load them with device={here!r}",
                code="conflict", field="device", value=here,
            )  # fmt: skip
        self.scales = scales.to(self.packed.device)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.bits}"


class Bf16Linear(QuantizedLinear):
    """Linear layer whose W (o, i) is prepacked in bf16: `packed` is an opaque tensor that torch lays out once, where an
    ordinary matmul would do so at every call.

    On Zen 4 a matmul of one row takes half the time, one of a thousand a twelfth less (docs/log.md)."""

    bits, few, of_head = 16, sys.maxsize, "bf16"

    def hold(self, weight: Tensor) -> None:
        if not onednn_in_bf16(weight.device.type):
            raise no_bf16()
        self.missing = 0
        if self.slow:
            self.few = OF_SLOW_BF16
        # No buffer: what moves, converts or copies buffers cannot do so with opaque ones.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16().contiguous())

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.packed.to_dense()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "packed": self.packed.to_dense()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.hold(self.packed)

    @property
    def operand(self) -> Tensor | None:
        return None if self.slow else self.packed

    @property
    def nbytes(self) -> int:
        return 2 * self.rows * self.in_features

    def unpacked(self, dtype: torch.dtype, rows: slice) -> Tensor:
        return self.packed.to_dense()[rows].to(dtype)

    def product_of_many(self, x: Tensor) -> Tensor:
        """Returns x W^T of many rows for a processor that is slow in bf16: all of W is converted to fp32 at once,
        because an opaque tensor cannot be cut into pieces."""
        return F.linear(x.float(), self.packed.to_dense().float()).to(x.dtype)

    def product(self, x: Tensor) -> Tensor:
        return as_among_others(lambda x: torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], ""), x)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        if (here := fn(torch.empty(0, device="cpu")).device.type) != "cpu":
            raise RequestError(
                f"weights of 16 bits were packed for cpu; load them for {here!r} without quantize",
                code="conflict", field="device", value=here,
            )  # fmt: skip
        nn.Module._apply(self, fn, recurse)
        return self


class Int8Linear(QuantizedLinear):
    """Linear layer whose W (o, i) is packed in 8 bits: packed (o, whole groups) int8, scales (o,).

    For the C++ of `few_rows.py` the numbers are in the blocks that its text shows, of whole blocks of rows."""

    bits, few = 8, 16

    def __init__(self, weight: Tensor, bias: Tensor | None, outs: tuple[int, ...]):
        self.own = own_product(weight.device.type)
        super().__init__(weight, bias, outs)
        if self.own:
            self.few = _of_our_own()

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        (o, i), packed = weight.shape, []
        more = -o % few_rows.ROWS if self.own else 0
        scales = weight.new_zeros(o + more, dtype=torch.bfloat16)
        for rows in _pieces(o, i, PIECE):
            w = weight[rows].float()
            scales[rows] = torch.maximum(w.amax(1), -w.amin(1)) / 127
            q = (w / scales[rows, None].float().clamp(min=TINY)).round_().clamp_(-127, 127).to(torch.int8)
            q = F.pad(q, (0, self.missing, 0, more if rows.stop == o else 0))
            packed.append(few_rows.blocks(q) if self.own else q)
        return torch.cat(packed), scales

    def unpacked(self, dtype: torch.dtype, rows: slice) -> Tensor:
        if self.own:
            blocks = slice(rows.start // few_rows.ROWS, -(-rows.stop // few_rows.ROWS))
            q = few_rows.codes(self.packed[blocks], dtype)[: rows.stop - rows.start, : self.in_features]
        else:
            q = self.packed[rows, : self.in_features]
        return q * self.scales[rows, None].to(dtype)

    def product(self, x: Tensor) -> Tensor:
        if self.own:
            y = few_rows.product(x, self.packed, self.scales)
            return y if y.shape[1] == self.rows else y[:, : self.rows]
        return torch._weight_int8pack_mm(x, self.packed, self.scales)


class Int4Linear(QuantizedLinear):
    """Linear layer whose W (o, i) is packed in 4 bits: `packed`, the numbers as torch lays them out for this device,
    and scales (groups, whole blocks of rows, 2), s and z.

    For the C++ of `few_rows.py` both are in the blocks that its text shows."""

    bits, few = 4, 48

    def __init__(self, weight: Tensor, bias: Tensor | None, outs: tuple[int, ...]):
        self.own = own_product(weight.device.type)
        super().__init__(weight, bias, outs)
        if self.own:
            self.few = _of_our_own()
        elif layout(self.packed.device.type) is None:
            self.few = sys.maxsize

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        (o, i), packed, more = weight.shape, [], -len(weight) % BLOCK
        scales = weight.new_zeros((i + self.missing) // GROUP, o + more, 2, dtype=torch.bfloat16)
        for rows in _pieces(o, i, PIECE):
            w = weight[rows].float()
            if self.missing:  # with values that do not change the ends of the group
                w = torch.cat((w, w[:, -1:].expand(-1, self.missing)), 1)
            groups = w.unflatten(1, (-1, GROUP))
            low, high = groups.amin(-1), groups.amax(-1)  # several times as fast as aminmax
            step = (high - low) / 15
            s, z = step.bfloat16().float(), (low + 8 * step).bfloat16().float()
            scales[:, rows] = torch.stack((s, z), -1).transpose(0, 1).bfloat16()
            q = ((groups - z[..., None]) / s.clamp(min=TINY)[..., None]).round_().add_(8).clamp_(0, 15).int().flatten(1)
            lay_out = few_rows.blocks if self.own else _pack4
            packed.append(lay_out(F.pad(q, (0, 0, 0, more)) if rows.stop == o else q))
        if self.own:
            scales = scales.unflatten(1, (-1, few_rows.ROWS)).transpose(0, 1).contiguous()
        return torch.cat(packed), scales

    def unpacked(self, dtype: torch.dtype, rows: slice) -> Tensor:
        filled = slice(rows.start, -(-rows.stop // BLOCK) * BLOCK)
        if self.own:
            blocks = slice(filled.start // few_rows.ROWS, filled.stop // few_rows.ROWS)
            w = few_rows.codes(self.packed[blocks], dtype).unflatten(1, (-1, GROUP))
            s, z = (part.to(dtype)[..., None] for part in self.grid(filled))
            return torch.addcmul(z, w, s, out=w).flatten(1)[: rows.stop - rows.start, : self.in_features]
        found = layout(self.packed.device.type)
        if found is None:  # W = (I W^T)^T
            one = torch.eye(self.in_features, dtype=torch.bfloat16, device=self.packed.device)
            return self.product_of_few(one)[:, rows].T.to(dtype)
        w = codes(self.packed[filled], self.in_features + self.missing, found, dtype).unflatten(0, (-1, GROUP))
        s, z = (part.to(dtype)[:, None].contiguous() for part in self.scales[:, filled].unbind(-1))
        return torch.addcmul(z, w, s, out=w).flatten(0, 1)[: self.in_features, : rows.stop - rows.start].T

    def grid(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Returns (s, z), the scales and middles of the groups of the rows `rows`, each (o, groups) bf16."""
        by_row = self.scales.transpose(1, 2).flatten(0, 1) if self.own else self.scales.transpose(0, 1)
        s, z = by_row[rows].unbind(-1)
        return s, z

    def product(self, x: Tensor) -> Tensor:
        if self.own:
            y = few_rows.product(x, self.packed, self.scales)
        elif x.device.type == "cpu":
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, GROUP, self.scales)
        else:
            y = torch.ops.aten._weight_int4pack_mm(x, self.packed, GROUP, self.scales)
        return y if y.shape[1] == self.rows else y[:, : self.rows]


def own_product(device: str) -> bool:
    """Returns True if matrices of 8 and 4 bits are packed for the C++ of `few_rows.py` on this type of device."""
    return device == "cpu" and bool(few_rows.kernel())


def _of_our_own() -> int:
    """Returns the largest number of rows that are multiplied with a packed matrix by the C++ of `few_rows.py`: all,
    unless the processor has units for bf16 (AMX)."""
    return OF_OUR_OWN if bf16_gain() > WITH_UNITS else sys.maxsize


def _pieces(rows: int, inner: int, values: int) -> Iterator[slice]:
    """Yields slices that divide `rows` rows of `inner` values each: whole blocks of `BLOCK` rows, with about `values`
    values per slice."""
    count = max(1, values // (inner * BLOCK)) * BLOCK
    for first in range(0, rows, count):
        yield slice(first, min(first + count, rows))


def _pack4(q: Tensor) -> Tensor:
    """Returns integers q (o, i) in 0..15 packed in torch's layout for the device of q."""
    if q.device.type == "cpu":
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    pairs = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8)
    tiles = next(tiles for tiles in (8, 4, 2) if q.shape[1] % (16 * tiles) == 0)
    return torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)


Layout = tuple[int, bool]
"""Layout of torch's packed 4-bit matrix on a CPU: the number of rows of a block, which is stored column by column, and
True if a byte holds a row of the block's first half (low) and one of its second half, False if it holds two
neighbours."""


@cache
def layout(device: str) -> Layout | None:
    """Returns the layout that torch uses on this processor, found by packing known numbers; None for an unknown one."""
    known = torch.randint(16, (BLOCK, GROUP), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    layouts = [(rows, halves) for rows in (64, 32, 16) for halves in (True, False)] if device == "cpu" else []
    packed = _pack4(known)
    return next((one for one in layouts if torch.equal(codes(packed, GROUP, one, torch.int32).T + 8, known)), None)


def codes(packed: Tensor, inner: int, how: Layout, dtype: torch.dtype) -> Tensor:
    """Returns the integers, minus 8, of a 4-bit matrix that torch has packed in the layout `how`, as (i, o) in
    `dtype`."""
    rows, halves = how
    both = packed.view(-1, inner, rows // 2).transpose(0, 1)
    codes = torch.empty(inner, both.shape[1], rows, dtype=dtype)
    low, high = codes.unflatten(-1, (2, -1)).unbind(-2) if halves else codes.unflatten(-1, (-1, 2)).unbind(-1)
    low.copy_((both & 15).view(torch.int8).sub_(8))
    high.copy_((both >> 4).view(torch.int8).sub_(8))
    return codes.flatten(1)


class SharedMemory:
    """Memory that the packed matrices of a model share, in the order in which a step reads them.

    values   values of all matrices together; of less than `LARGE`, each keeps separate memory"""

    def __init__(self, values: int):
        self.chunk = CHUNK if values >= LARGE else 0
        self.memory = torch.empty(0, dtype=torch.uint8)

    def take(self, packed: QuantizedLinear) -> None:
        """Moves the packed tensors of a layer into this memory, if they are plain tensors on the CPU."""
        if not self.chunk or isinstance(packed, Bf16Linear) or packed.packed.device.type != "cpu":
            return
        for name in ("packed", "scales"):
            tensor = getattr(packed, name)
            size = -(-tensor.nbytes // ALIGNED) * ALIGNED
            if size > len(self.memory):
                self.memory = in_huge_pages(max(size, self.chunk))
            mine, self.memory = self.memory[: tensor.nbytes], self.memory[size:]
            setattr(packed, name, mine.view(tensor.dtype).view(tensor.shape).copy_(tensor))


QUANTIZED: dict[str, type[QuantizedLinear]] = {"bf16": Bf16Linear, "int8": Int8Linear, "int4": Int4Linear}


def quantize(model: nn.Module, kind: str, head: str | None = None) -> nn.Module:
    """Packs the matrices of all `Linear` layers of the model, and of the head, in place, and returns the model. The
    embedding, which is only read by row, is unchanged, and so are routers and the stacked matrices of experts.

    `head`: another kind for the head; by default bf16 together with bf16, else int8. The model can then only be
    evaluated: no parameter has a gradient. Raises RequestError."""
    head = head or (QUANTIZED[kind].of_head if kind in QUANTIZED else kind)
    for field, wanted in (("quantize", kind), ("head", head)):
        if wanted not in QUANTIZED:
            raise RequestError(
                f"quantize={wanted!r}: use {' or '.join(QUANTIZED)}", code="unknown", field=field, value=wanted
            )
    every = [(path, module) for path, module in model.named_modules() if isinstance(module, Linear)]
    linears = [(path, module) for path, module in every if module.packable]
    if any(isinstance(module, QuantizedLinear) for _, module in linears):
        raise RequestError(
            f"quantize={kind!r}: the weights of this model are packed already",
            code="conflict", field="quantize", value=kind,
        )  # fmt: skip
    embedding: Any = model.embedding
    memory = SharedMemory(sum(module.in_features * sum(module.outs) for _, module in linears))
    for path, module in linears:
        weight = module.applied().to(embedding.device)
        packed = QUANTIZED[kind](weight, module.bias, module.outs)
        memory.take(packed)
        model.set_submodule(path, packed)
    part: Any = model.head
    part.pack(QUANTIZED[head], embedding)
    if part.packed is not None:
        memory.take(part.packed)
    return model.eval().requires_grad_(False)
