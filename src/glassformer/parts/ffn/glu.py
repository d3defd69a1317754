from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from glassformer.parts.base import BuildContext
from glassformer.parts.ffn.base import ACTIVATIONS, FFNConfig
from glassformer.parts.linear import Linear, linear_params
from glassformer.parts.site import Site


class Glu(nn.Module):
    """y = (phi(x W_gate) * x W_up) W_down; x, y (b, s, d), gate, up, hidden (b, s, f). Shazeer 2020, 2002.05202.

    phi: sigmoid (GLU), relu (ReGLU), gelu or gelu_tanh (GEGLU), silu (SwiGLU). Sites: gate, up, hidden, out.
    """

    def __init__(self, d_model: int, hidden: int, activation: str = "silu", bias: bool = False):
        super().__init__()
        # Two products: one of twice the width strides by powers of two and ran slower (docs/log.md, 2026-11-21).
        self.gate_proj = Linear(d_model, hidden, bias)
        self.up_proj = Linear(d_model, hidden, bias)
        self.down_proj = Linear(hidden, d_model, bias, role="output")
        self.activation = ACTIVATIONS[activation]
        self.gate, self.up, self.hidden, self.out = Site(), Site(), Site(), Site()

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        hidden = self.hidden(self.activation(self.gate(self.gate_proj(x))) * self.up(self.up_proj(x)))
        return self.out(self.down_proj(hidden))


class GluConfig(FFNConfig, kind="glu"):
    activation: Literal["sigmoid", "relu", "gelu", "gelu_tanh", "silu"] = "silu"
    bias: bool = False
    multiple_of: int = Field(8, gt=0)
    """When `hidden` is not given: 8/3 d rounded up to a multiple of this."""

    def width(self, ctx: BuildContext) -> int:
        return self.hidden or -(-8 * ctx.d_model // (3 * self.multiple_of)) * self.multiple_of

    def build(self, ctx: BuildContext) -> Glu:
        return Glu(ctx.d_model, self.width(ctx), self.activation, self.bias)

    def num_params(self, ctx: BuildContext) -> int:
        f = self.width(ctx)
        return 2 * linear_params(ctx.d_model, f, self.bias) + linear_params(f, ctx.d_model, self.bias)

    def flops(self, ctx: BuildContext, t: float) -> float:
        return 6 * ctx.d_model * self.width(ctx)
