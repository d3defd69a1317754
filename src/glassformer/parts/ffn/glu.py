from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from glassformer.parts.base import BuildContext
from glassformer.parts.cost import Cost, Shape
from glassformer.parts.ffn.base import ACTIVATIONS, EXTRA_KEPT, FFN, Activation, FFNConfig
from glassformer.parts.ffn.ending import can_end, gated_end
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.precision import wide
from glassformer.parts.region import region
from glassformer.parts.reparam import MakeReparam
from glassformer.parts.shard import Shard
from glassformer.parts.site import Site
from glassformer.parts.words import Word, whole


class Glu(FFN):
    """y = (phi(x W_gate) * x W_up) W_down; x, y (b, s, d), gate, up, hidden (b, s, f). Shazeer 2020, 2002.05202.

    phi: sigmoid (GLU), relu (ReGLU), gelu or gelu_tanh (GEGLU), silu (SwiGLU). Sites: gate, up, hidden, out.
    """

    def __init__(
        self,
        d_model: int,
        hidden: int,
        activation: str = "silu",
        bias: bool = False,
        reparam: MakeReparam | None = None,
    ):
        super().__init__()
        # Two products: one of twice the width strides by powers of two and ran slower (docs/log.md, 2026-11-21).
        self.gate_proj = Linear(d_model, hidden, bias, reparam=reparam, shard=Shard("column"))
        self.up_proj = Linear(d_model, hidden, bias, reparam=reparam, shard=Shard("column"))
        self.down_proj = Linear(hidden, d_model, bias, role="output", reparam=reparam, shard=Shard("row"))
        self.activation, self.gating = activation, gating(activation)
        self.gate, self.up, self.hidden, self.out = Site("bsf"), Site("bsf"), Site("bsf"), Site()

    def matrices(self) -> dict[str, Matrix]:
        """Its maps by name."""
        return {"gate": Matrix.of(self.gate_proj), "up": Matrix.of(self.up_proj), "down": Matrix.of(self.down_proj)}

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        if can_end(x, self.activation, (self.gate_proj, self.up_proj), (self.gate, self.up)):
            if self.gate.watched or self.up.watched:  # beside the product, which goes on as if nobody did
                self.gate(self.gate_proj(x)), self.up(self.up_proj(x))
            hidden = gated_end(x, self.gate_proj, self.up_proj, self.activation)
        else:
            hidden = self.gating(self.gate(self.gate_proj(x)), self.up(self.up_proj(x)))
        return self.out(self.down_proj(self.hidden(hidden)))


def gated(activation: Activation) -> Callable[[Tensor, Tensor], Tensor]:
    """(gate, up) -> activation(gate) * up, the definition."""
    return lambda gate, up: activation(gate) * up


@region
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    g = wide(gate)
    return (g * torch.sigmoid(g) * wide(up)).to(gate.dtype)


@region
def _swiglu_grad(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    d, g = wide(grad), wide(gate)
    s = torch.sigmoid(g)
    return (d * wide(up) * (s + g * s * (1 - s))).to(gate.dtype), (d * g * s).to(gate.dtype)


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up, keeping only gate and up for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return _swiglu_grad(grads[0], *ctx.saved_tensors)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    if torch.is_grad_enabled():
        return _SwiGlu.apply(gate, up)
    if gate.dtype != wide(gate).dtype:  # torch's own rounds twice, and is many times faster than three passes in fp32
        return F.silu(gate) * up
    return _swiglu(gate, up)


# Gatings with a fused twin; every other activation takes the definition.
FUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"silu": swiglu}


def gating(activation: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(gate, up) -> phi(gate) * up, the fastest there is."""
    return FUSED.get(activation) or gated(ACTIVATIONS[activation])


_WORDS = tuple(
    Word(name, whole("hidden"), "1024", optional=True, fields={"activation": activation})
    for name, activation in {"glu": "sigmoid", "reglu": "relu", "geglu": "gelu", "swiglu": "silu"}.items()
)


class GluConfig(FFNConfig, kind="glu", words=_WORDS):
    activation: Literal["sigmoid", "relu", "gelu", "gelu_tanh", "silu"] = "silu"
    bias: bool = False
    multiple_of: int = Field(8, gt=0, le=1 << 20)
    """When `hidden` is not given: 8/3 d rounded up to a multiple of this."""

    def width(self, ctx: BuildContext) -> int:
        return self.hidden or -(-8 * ctx.d_model // (3 * self.multiple_of)) * self.multiple_of

    def n_matrices(self) -> int:
        return 3

    def as_experts(self) -> dict[str, Any]:
        return {"gated": True, "activation": self.activation, "bias": self.bias}

    def explicit(self, ctx: BuildContext) -> GluConfig:
        return self.vary(hidden=self.width(ctx), multiple_of=1)

    def build(self, ctx: BuildContext) -> Glu:
        return Glu(ctx.d_model, self.width(ctx), self.activation, self.bias, ctx.make_reparam)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        d, f = ctx.d_model, self.width(ctx)
        down = linear_cost(ctx, shape.reading(shape.products), f, d, bias=self.bias)
        fused = self.activation in FUSED  # keeps gate and up; others phi(gate), up, and what phi keeps
        gating = Cost(kept=shape.keeps((2 if fused else 2 + EXTRA_KEPT[self.activation]) * f))
        return linear_cost(ctx, shape, d, f, f, bias=self.bias) + gating + down
