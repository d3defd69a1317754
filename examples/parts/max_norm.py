"""A norm by the largest value: y = x / (max |x| + eps) * w over the last axis."""

import torch
from torch import nn

from glassformer.parts.own import Norm, NormConfig, norm_cost, wide


class MaxNorm(Norm):
    def __init__(self, width, eps):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.empty(width))

    def init_weights(self, init):
        self.weight.data.fill_(1.0)

    def forward(self, x):
        y = wide(x)  # float32 at least
        return (y / (y.abs().amax(-1, keepdim=True) + self.eps) * wide(self.weight)).to(x.dtype)


class MaxNormConfig(NormConfig, kind="max_norm", words="maxnorm"):
    def build(self, ctx):
        return MaxNorm(ctx.width or ctx.d_model, self.eps)

    def costs(self, ctx, shape):
        return norm_cost(ctx, shape, weights=1, statistics=1)
