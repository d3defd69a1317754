"""Quantised weights that stay as their file stores them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from glassformer.convert.names import TensorPiece
from glassformer.convert.storage import Packed
from glassformer.errors import RequestError
from glassformer.parts.linear import Linear
from glassformer.parts.quantized import UNTRAINED


class PackedLinear(Linear):
    """A `Linear` whose weight is unpacked at every call: the memory of the file, and one weight at a time in full.

    Equals the `Linear` with the unpacked weight; nothing trains it."""

    def __init__(self, like: Linear, packed: Sequence[tuple[TensorPiece, Packed]], dtype: torch.dtype):
        nn.Module.__init__(self)
        self.in_features, self.outs, self.roles, self.bias = like.in_features, like.outs, like.roles, like.bias
        self.reparam = None
        self.packed, self.dtype = list(packed), dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        made = torch.empty(sum(self.outs), self.in_features, dtype=self.dtype)
        for piece, packed in self.packed:
            value = packed.dequantize(self.dtype)
            piece.mine(made).copy_(piece.their(value))
        return made

    def train(self, mode: bool = True) -> PackedLinear:
        if mode:
            raise RequestError(UNTRAINED, code="unsupported", field="quantize")
        return super().train(mode)

    @property
    def nbytes(self) -> int:
        return sum(packed.bytes.nbytes for _, packed in self.packed)
