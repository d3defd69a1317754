from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.shard import REPLICATED, Shard, Shards
from glassformer.parts.precision import product_dtype

FP32 = torch.float32


class RowNorm(NamedTuple):
    """Numbers of a norm of each vector x (d): (x - m) rate w + b, with rate = 1 / sqrt(mean((x - m)^2) + eps)."""

    eps: float
    centred: bool
    """True if m is the mean of x; False if it is 0."""
    weight: Tensor
    """Factors w (d,)."""
    offset: Tensor | None
    """Offsets b (d,); None for 0."""


class Norm(nn.Module):
    """Base of norms: functions (..., d) -> (..., d) that fix the scale of each vector.

    The result has x's dtype; with `feeds_products` (for norms whose output only matmuls read) the dtype of matmuls,
    which saves every matmul a conversion.
    """

    def __init__(self, feeds_products: bool = False):
        super().__init__()
        self.feeds_products = feeds_products

    @property
    def shards(self) -> Shards:
        """Mapping {name of a weight: its division among tensor-parallel ranks}: weights per head, (n, h), are divided
        by heads; a vector is replicated."""
        own = self.named_parameters(recurse=False)
        return {name: (Shard("column") if weight.dim() == 2 else REPLICATED,) for name, weight in own}

    def held(self, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (below, constant) of this norm, linearised with the scale fixed at that of x (d,): direction .
        norm(x) = below . x + constant, for logit attribution. Raises RequestError for a norm that does not define
        it."""
        raise RequestError(
            f"{type(self).__name__} does not define held(x, direction), which logit attribution needs",
            code="unsupported", field="norm", value=type(self).__name__,
        )  # fmt: skip

    def of_rows(self) -> RowNorm | None:
        """Returns the numbers of this norm, if `RowNorm` describes all that it computes; None otherwise."""
        return None

    def out_dtype(self, x: Tensor) -> torch.dtype:
        return product_dtype(x) if self.feeds_products else x.dtype


class NormConfig(PartConfig, axis="norm"):
    eps: float = Field(1e-5, gt=0)

    @property
    def of_rows(self) -> bool:
        """True if `RowNorm` describes the norm."""
        return False

    @abstractmethod
    def build(self, ctx: BuildContext) -> Norm:
        """Returns the norm: forward(x (..., d)) -> (..., d), d = `ctx.width` or `ctx.d_model`. With `ctx.sets`, x is
        (..., sets, d) and each set has separate weights."""

    @abstractmethod
    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns parameters and bytes of the norm for the workload `shape`; `norm_cost` counts those of common
        norms."""


def norm_cost(ctx: BuildContext, shape: Shape, weights: int, statistics: int) -> Cost:
    """Returns the cost of a norm with `weights` weights per element that keeps its input and `statistics` numbers per
    vector; with `ctx.sets` also the normalised elements."""
    sets = ctx.sets or 1
    values = sets * (ctx.width or ctx.d_model)
    kept = shape.keeps(values * (1 if ctx.sets is None else 2), shape.inputs) + shape.keeps(sets * statistics, FP32)
    return Cost.weights(weights * values, kept=kept, moved_bytes=shape.reads(weights * values))
