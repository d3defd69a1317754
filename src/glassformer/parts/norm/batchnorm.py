from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.norm.base import Norm, NormConfig, norm_cost
from glassformer.parts.precision import exact, wide


class BatchNorm(Norm):
    """y = (x - m) / sqrt(v + eps) * w + b, channel by channel; x, y (..., d). Ioffe & Szegedy 2015, 1502.03167.

    In training, m and v (d,) are mean and variance over all tokens of all texts in the batch, so that a token's result
    depends on later tokens and on other texts; evaluation uses running means of both, which move by the share
    `momentum` at each pass. With `sets`, x is (..., sets, d) and w, b are (sets, d).
    """

    def __init__(
        self, width: int, eps: float = 1e-5, momentum: float = 0.1, sets: int | None = None,
        feeds_products: bool = False,
    ):  # fmt: skip
        super().__init__(feeds_products)
        self.eps, self.momentum = eps, momentum
        shape = (width,) if sets is None else (sets, width)
        self.weight, self.bias = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))

    mean: Tensor
    variance: Tensor

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        rows = wide(x).reshape(-1, self.weight.numel())
        if self.training and len(rows) < 2:
            raise RequestError(
                "norm=batchnorm needs two tokens or more in a batch while it trains, got 1",
                code="range", field="norm", value=len(rows), expected=">= 2 tokens",
            )  # fmt: skip
        y = F.batch_norm(
            rows, self.mean.flatten(), self.variance.flatten(), self.weight.flatten(), self.bias.flatten(),
            self.training, self.momentum, self.eps,
        )  # fmt: skip
        return y.view_as(x).to(self.out_dtype(x))

    def held(self, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        below = direction * exact(self.weight) / (exact(self.variance) + self.eps).sqrt()
        return below, direction @ exact(self.bias) - below @ exact(self.mean)

    @torch.no_grad()
    def init_weights(self, init: object) -> None:
        for ones, zeros in ((self.weight, self.bias), (self.variance, self.mean)):
            ones.fill_(1.0)
            zeros.zero_()


def naive_batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Returns x (n, d) normalised by the definition in training: every channel has mean `bias` and deviation `weight`
    over the batch."""
    mean = x.mean(0)
    return (x - mean) / ((x - mean).square().mean(0) + eps).sqrt() * weight + bias


class BatchNormConfig(NormConfig, kind="batchnorm", words="batchnorm"):
    """Config of batch norm, for comparison: a causal model trained with it depends on the tokens that it predicts."""

    caution: ClassVar[str] = (
        "batchnorm takes mean and variance over the batch: while training, every token depends on later tokens and on "
        "other texts, so that the training loss of a causal model is too low; judge it by its validation loss"
    )
    momentum: float = Field(0.1, gt=0, le=1)
    """Weight of a batch's mean and variance in the running ones."""

    def build(self, ctx: BuildContext) -> BatchNorm:
        return BatchNorm(ctx.width or ctx.d_model, self.eps, self.momentum, ctx.sets, ctx.feeds_products)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        return norm_cost(ctx, shape, weights=2, statistics=0)
