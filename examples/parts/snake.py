"""A feed-forward network with the snake activation of Ziyin et al. 2020, 2006.08195, a = 1: h + sin(h)^2."""

import torch

from glassformer.parts.own import FFN, FFNConfig, Linear, linear_cost


class Snake(FFN):
    def __init__(self, d_model, hidden):
        super().__init__()
        self.up = Linear(d_model, hidden)
        self.down = Linear(hidden, d_model, role="output")

    def forward(self, x, pass_=None):  # x, y (b, s, d)
        h = self.up(x)
        return self.down(h + torch.sin(h) ** 2)


class SnakeConfig(FFNConfig, kind="snake", words="snake"):
    def width(self, ctx):
        return self.hidden or 4 * ctx.d_model

    def build(self, ctx):
        return Snake(ctx.d_model, self.width(ctx))

    def costs(self, ctx, shape):
        d, f = ctx.d_model, self.width(ctx)
        return linear_cost(ctx, shape, d, f) + linear_cost(ctx, shape, f, d)
