"""A part of your own, in a file of its own: importing it makes its short name known, as in llama@1m+sine."""

import torch

from glassformer.parts.own import FFN, FFNConfig, Linear, linear_cost


class Sine(FFN):
    """y = sin(x W_up) W_down; x, y (b, s, d)."""

    def __init__(self, d_model, hidden):
        super().__init__()
        self.up = Linear(d_model, hidden)
        self.down = Linear(hidden, d_model, role="output")

    def forward(self, x, pass_=None):
        return self.down(torch.sin(self.up(x)))


class SineConfig(FFNConfig, kind="sine", words="sine"):
    def width(self, ctx):
        return self.hidden or 4 * ctx.d_model

    def build(self, ctx):
        return Sine(ctx.d_model, self.width(ctx))

    def costs(self, ctx, shape):
        d, f = ctx.d_model, self.width(ctx)
        return linear_cost(ctx, shape, d, f) + linear_cost(ctx, shape, f, d)
