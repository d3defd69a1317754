"""Embedding of vectors of real numbers as a sequence."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext, Value
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.init import Init
from glassformer.parts.linear import Linear, linear_cost
from glassformer.parts.reparam import MakeReparam


class ReadIn(Linear):
    """Linear layer of `Vectors`, initialised as U(-a, a) with a = sqrt(3 / size), so that numbers of variance 1 keep it
    in the stream, where the tables of tokens are initialised small. At .02 positions are as large as the input."""

    packable = False

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        end = math.sqrt(3 / self.in_features)
        init.fill_uniform(self.weight, -end, end)
        if self.reparam is not None:
            self.reparam.begin(self.weight)
        if self.bias is not None:
            self.bias.zero_()


class Vectors(nn.Module):
    """Embedding of vectors: x_i = v_i W + b: vectors (b, s, size) -> x (b, s, d). The input layer of Garg et al. 2022,
    2208.01066."""

    def __init__(self, d_model: int, size: int, bias: bool = True, reparam: MakeReparam | None = None):
        super().__init__()
        self.size = size
        self.projection = ReadIn(size, d_model, bias, reparam=reparam)

    def check(self, vectors: Tensor) -> None:
        """Raises RequestError for a tensor that does not hold vectors of this size."""
        if vectors.dim() != 3 or vectors.shape[2] != self.size or not vectors.is_floating_point():
            kind = "floating" if vectors.is_floating_point() else "whole"
            raise RequestError(
                f"this model reads vectors (b, s, {self.size}) of floating numbers, and {tuple(vectors.shape)} of "
                f"{kind} ones were given",
                code="conflict", field="vectors", value=tuple(vectors.shape), expected=str(("b", "s", self.size)),
            )  # fmt: skip

    def forward(self, vectors: Float[Tensor, "b s v"]) -> Float[Tensor, "b s d"]:
        return self.projection(vectors.to(self.projection.weight.dtype))

    def extra_repr(self) -> str:
        return f"size={self.size}"


class VectorsConfig(Value):
    """Config of `Vectors`, the embedding of vectors of real numbers. The vocabulary of a model that reads vectors has
    no meaning."""

    size: int = Field(gt=0, le=1 << 16)
    """Number of elements of an input vector."""
    bias: bool = True

    def build(self, ctx: BuildContext) -> Vectors:
        return Vectors(ctx.d_model, self.size, self.bias, ctx.make_reparam)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        return linear_cost(ctx, shape, self.size, ctx.d_model, bias=self.bias)
