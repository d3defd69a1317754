"""Matrices kept in 8 or 4 bits: decoding reads every weight for every token, so bytes are time.

int8   w = q s: a scale for each row (output); torch's `_weight_int8pack_mm`
int4   w = q s + z, q in 0..15: a scale and a zero for each group of 32 values of a row, from the group's smallest and
       largest value, which is the grid of GGUF's Q4_1; torch's `_weight_int4pack_mm`

Only weights are rounded; products run in bf16 and add up in fp32. A few tokens at a time take the packed product, many
(a prompt) unpack the matrix once and take the ordinary one. Nothing trains these.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.linear import Linear

GROUP = 32
FEW = 16
"""Up to so many tokens the packed product is faster than unpacking (docs/benchmarks/generate.md)."""


class QuantizedLinear(Linear):
    """A `Linear` whose W (o, i) is packed; it takes and returns x's dtype."""

    bits: int

    def __init__(self, weight: Tensor, bias: Tensor | None, outs: tuple[int, ...]):
        nn.Module.__init__(self)
        self.in_features, self.outs, self.role = weight.shape[1], outs, "hidden"
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        for name, tensor in zip(("packed", "scales"), self.pack(weight.detach()), strict=True):
            self.register_buffer(name, tensor)

    packed: Tensor
    scales: Tensor

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).bfloat16()
        if rows.shape[0] <= FEW:
            y = self.product(rows)
        else:
            y = F.linear(rows, self.unpacked().bfloat16())
        y = y.view(*x.shape[:-1], -1).to(x.dtype)
        return y if self.bias is None else y + self.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The values it stands for, fp32."""
        return self.unpacked()

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def unpacked(self) -> Tensor:
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """x (rows, i) bf16 -> (rows, o) bf16."""
        raise NotImplementedError


class Int8Linear(QuantizedLinear):
    bits = 8

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        weight = weight.float()
        scales = (weight.abs().amax(1) / 127).bfloat16()
        q = (weight / scales.float().clamp(min=1e-30)[:, None]).round().clamp(-127, 127)
        return q.to(torch.int8), scales

    def unpacked(self) -> Tensor:
        return self.packed * self.scales.float()[:, None]

    def product(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, self.packed, self.scales)


class Int4Linear(QuantizedLinear):
    bits = 4

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        groups = weight.float().unflatten(1, (-1, GROUP))
        low, high = groups.amin(-1), groups.amax(-1)
        step = ((high - low) / 15).bfloat16().float()
        q = ((groups - low[..., None]) / step.clamp(min=1e-30)[..., None]).round().clamp(0, 15).flatten(1)
        zero = low + 8 * step  # the products take q - 8
        return _pack4(q.to(torch.int32)), torch.stack((step, zero), -1).transpose(0, 1).contiguous().bfloat16()

    def unpacked(self) -> Tensor:
        """From the packed product itself, as the layout of the numbers is torch's own: W = (I W^T)^T."""
        out = torch.empty(sum(self.outs), self.in_features, device=self.packed.device)
        for first in range(0, self.in_features, GROUP):
            one = torch.zeros(GROUP, self.in_features, dtype=torch.bfloat16, device=out.device)
            one[torch.arange(GROUP), torch.arange(first, first + GROUP)] = 1
            out[:, first : first + GROUP] = self.product(one).T
        return out

    def product(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, GROUP, self.scales)
        return torch.ops.aten._weight_int4pack_mm(x, self.packed, GROUP, self.scales)


def _pack4(q: Tensor) -> Tensor:
    """q (o, i) in 0..15 -> torch's layout for this device."""
    if q.device.type == "cpu":
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    pairs = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8)
    return torch.ops.aten._convert_weight_to_int4pack(pairs, 8)


QUANTIZED: dict[str, Callable[[Tensor, Tensor | None, tuple[int, ...]], QuantizedLinear]] = {
    "int8": Int8Linear,
    "int4": Int4Linear,
}


def fits(kind: str, out: int, inner: int) -> bool:
    """Whether torch has the packed product for an (o, i) matrix."""
    return kind == "int8" or (inner % GROUP == 0 and out % 16 == 0)


def quantize(model: nn.Module, kind: str, head: str = "int8") -> nn.Module:
    """Packs every `Linear` of the model in place, and the head; the embedding, which is looked up, stays as it is.

    A matrix whose shape torch has no 4-bit product for is kept in 8 bits. Raises RequestError."""
    if kind not in QUANTIZED:
        raise RequestError(f"quantize={kind!r}: use {' or '.join(QUANTIZED)}")
    for path, module in list(model.named_modules()):
        if type(module) is Linear:
            packed = QUANTIZED[kind if fits(kind, *module.weight.shape) else "int8"]
            model.set_submodule(path, packed(module.weight, module.bias, module.outs))
    model.head.pack(QUANTIZED[head], model.embedding.weight)  # type: ignore[union-attr, operator]
    return model
