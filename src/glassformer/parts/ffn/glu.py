from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts import fused_products
from glassformer.parts.core.base import BuildContext, Value
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.owner import Owner
from glassformer.parts.core.shard import Shard
from glassformer.parts.core.site import Site
from glassformer.parts.core.words import Word, whole
from glassformer.parts.ffn.base import ACTIVATIONS, EXTRA_KEPT, FFN, Activation, FFNConfig
from glassformer.parts.ffn.fused_activation import clamped_glu, gated_at_once, swiglu
from glassformer.parts.forward_pass import Pass
from glassformer.parts.fused_products import FusedPart
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.norm import Norm
from glassformer.parts.reparam import MakeReparam


class Glu(FFN):
    """y = (phi(x W_gate) * x W_up) W_down; x, y (b, s, d), gate, up, hidden (b, s, f). Shazeer 2020, 2002.05202.

    phi: sigmoid (GLU), relu (ReGLU), gelu or gelu_tanh (GEGLU), silu (SwiGLU). With `clamp`, phi(gate) * up is bounded
    as `Clamp` says. Sites: gate, up, hidden, out.
    """

    by_token = True

    def __init__(
        self,
        d_model: int,
        hidden: int,
        activation: str = "silu",
        bias: bool = False,
        reparam: MakeReparam | None = None,
        clamp: Clamp | None = None,
    ):
        super().__init__()
        # two matmuls: one of twice the width strides by powers of two and ran slower (docs/log.md, 2026-11-21)
        self.gate_proj = Linear(d_model, hidden, bias, reparam=reparam, shard=Shard("column"))
        self.up_proj = Linear(d_model, hidden, bias, reparam=reparam, shard=Shard("column"))
        self.down_proj = Linear(hidden, d_model, bias, role="output", reparam=reparam, shard=Shard("row"))
        self.activation, self.gating, self.clamp = activation, gating(activation, clamp), clamp
        self.fusible = activation if clamp is None else None
        self.in_blocks = type(self).forward is Glu.forward and clamp is None
        self.gate, self.up, self.hidden, self.out = Site("bsf"), Site("bsf"), Site("bsf"), Site()

    def matrices(self) -> dict[str, Matrix]:
        """Returns the weight matrices of this FFN by name: gate, up and out."""
        return {"gate": Matrix.of(self.gate_proj), "up": Matrix.of(self.up_proj), "down": Matrix.of(self.down_proj)}

    def divide(self, owner: Owner) -> None:
        owner.share("hidden", self.up_proj.outs[0])
        self.enter = owner.enter

    def added_at_once(self, x: Tensor, norm: Norm, pass_: Pass | None = None) -> FusedPart | None:
        return None if self.enter is not None else self._in_blocks(x, norm)

    def _in_blocks(self, x: Tensor, norm: Norm | None = None) -> FusedPart | None:
        layers = (self.gate_proj, self.up_proj), self.down_proj
        return fused_products.feed(self, x, self.activation, *layers, norm) if self.in_blocks else None

    def forward(self, x: Float[Tensor, "*b d"], pass_: Pass | None = None) -> Float[Tensor, "*b d"]:
        x = x if self.enter is None else self.enter(x)
        at_once = self._in_blocks(x)
        if at_once is not None:
            return self.out(at_once(x))
        hidden = gated_at_once(x, self.fusible, (self.gate_proj, self.gate), (self.up_proj, self.up))
        if hidden is None:
            hidden = self.gating(self.gate(self.gate_proj(x)), self.up(self.up_proj(x)))
        return self.out(self.down_proj(self.hidden(hidden)))


def gated(activation: Activation) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the function (gate, up) -> activation(gate) * up, by its definition."""
    return lambda gate, up: activation(gate) * up


class Clamp(Value):
    """Bounds of a SwiGLU as in gpt-oss (2508.10925): h = g sigmoid(alpha g) (u + shift), with g = min(gate, limit) and
    u = up clamped to [-limit, limit]. Outliers cannot grow, and clipped values have no gradient."""

    limit: float = Field(7.0, gt=0)
    alpha: float = Field(1.702, gt=0)
    """Factor alpha in the sigmoid: 1 makes g sigmoid(alpha g) silu, 1.702 nearly gelu."""
    shift: float = 1.0
    """Constant added to u (up); with 1, a token whose u is zero still passes the gate."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_number(cls, value: Any) -> Any:
        """Converts a number to the fields of a `Clamp` with that `limit`; returns any other value unchanged."""
        return {"limit": value} if isinstance(value, (int, float)) else value


def naive_clamped_glu(gate: Tensor, up: Tensor, clamp: Clamp) -> Tensor:
    """Returns the gating h (..., f) for gate and up (..., f), bounded as `Clamp` defines it."""
    g, u = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return g * torch.sigmoid(clamp.alpha * g) * (u + clamp.shift)


# gatings with a fused version; other activations use the definition
FUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"silu": swiglu}


def gating(activation: str, clamp: Clamp | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the fastest function (gate, up) -> phi(gate) * up for this activation phi, with the bounds of `clamp` if
    given."""
    if clamp is not None:
        return partial(clamped_glu, limit=clamp.limit, alpha=clamp.alpha, shift=clamp.shift)
    return FUSED.get(activation) or gated(ACTIVATIONS[activation])


_WORDS = tuple(
    Word(name, whole("hidden"), "1024", optional=True, fields={"activation": activation})
    for name, activation in {"glu": "sigmoid", "reglu": "relu", "geglu": "gelu", "swiglu": "silu"}.items()
)


def refuse_clamp(clamp: Clamp | None, activation: str) -> None:
    """Raises RequestError if `clamp` is set for an activation other than silu."""
    if clamp is not None and activation != "silu":
        raise RequestError(
            f"clamp bounds a gate of silu, and activation={activation}; use silu, or leave clamp out",
            code="conflict", field="clamp", value=clamp,
        )  # fmt: skip


class GluConfig(FFNConfig, kind="glu", words=_WORDS):
    activation: Literal["sigmoid", "relu", "gelu", "gelu_tanh", "silu"] = "silu"
    bias: bool = False
    multiple_of: int = Field(8, gt=0, le=1 << 20)
    """Multiple to which 8/3 d is rounded up, if `hidden` is not set."""
    clamp: Clamp | None = None
    """Bounds of the gating of a SwiGLU; None without bounds."""

    @model_validator(mode="after")
    def _clamps_silu(self) -> GluConfig:
        refuse_clamp(self.clamp, self.activation)
        return self

    def width(self, ctx: BuildContext) -> int:
        return self.hidden or -(-8 * ctx.d_model // (3 * self.multiple_of)) * self.multiple_of

    def n_matrices(self) -> int:
        return 3

    def as_experts(self) -> dict[str, Any]:
        return {"gated": True, "activation": self.activation, "bias": self.bias}

    def resolved(self, ctx: BuildContext) -> GluConfig:
        return self.replace(hidden=self.width(ctx), multiple_of=1)

    def build(self, ctx: BuildContext) -> Glu:
        return Glu(ctx.d_model, self.width(ctx), self.activation, self.bias, ctx.make_reparam, self.clamp)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        cost = self.separate_costs(ctx, shape)
        if not self.at_once(ctx, shape):
            return cost
        again = 1 if self.activation in FUSED else 1 + EXTRA_KEPT[self.activation]  # all but gate and up
        return cost + Cost(kept=-shape.keeps(again * self.width(ctx)))

    def at_once(self, ctx: BuildContext, shape: Shape) -> bool:
        return self.clamp is None and fused_products.counts(ctx, shape)

    def separate_costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        d, f = ctx.d_model, self.width(ctx)
        down = linear_cost(ctx, shape.reading(shape.products), f, d, bias=self.bias)
        fused = self.activation in FUSED  # keeps gate and up; others phi(gate), up, and the tensors of phi
        gating = Cost(kept=shape.keeps((2 if fused else 2 + EXTRA_KEPT[self.activation]) * f))
        return linear_cost(ctx, shape, d, f, f, bias=self.bias) + gating + down
