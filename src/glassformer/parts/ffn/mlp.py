from __future__ import annotations

from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from glassformer.parts import fused_products
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.owner import Owner
from glassformer.parts.core.shard import Shard
from glassformer.parts.core.site import Site
from glassformer.parts.core.words import Word, whole
from glassformer.parts.ffn.base import ACTIVATIONS, EXTRA_KEPT, FFN, FFNConfig
from glassformer.parts.ffn.fused_activation import activated_at_once
from glassformer.parts.forward_pass import Pass
from glassformer.parts.fused_products import FusedPart
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.norm import Norm
from glassformer.parts.reparam import MakeReparam


class Mlp(FFN):
    """y = phi(x W_up + b) W_down + b; x, y (b, s, d), hidden (b, s, f). Vaswani et al. 2017, section 3.3.

    phi: relu, gelu (erf), gelu_tanh (GPT-2's), silu, relu2 (So et al. 2021, 2109.08668). Sites: up, hidden, out.
    """

    by_token = True

    def __init__(
        self,
        d_model: int,
        hidden: int,
        activation: str = "gelu_tanh",
        bias: bool = True,
        reparam: MakeReparam | None = None,
    ):
        super().__init__()
        self.up_proj = Linear(d_model, hidden, bias, reparam=reparam, shard=Shard("column"))
        self.down_proj = Linear(hidden, d_model, bias, role="output", reparam=reparam, shard=Shard("row"))
        self.activation, self.phi = activation, ACTIVATIONS[activation]
        self.in_blocks = type(self).forward is Mlp.forward
        self.up, self.hidden, self.out = Site("bsf"), Site("bsf"), Site()

    def matrices(self) -> dict[str, Matrix]:
        """Returns the weight matrices of this FFN by name: up and out."""
        return {"up": Matrix.of(self.up_proj), "down": Matrix.of(self.down_proj)}

    def divide(self, owner: Owner) -> None:
        owner.share("hidden", self.up_proj.outs[0])
        self.enter = owner.enter

    def added_at_once(self, x: Tensor, norm: Norm, pass_: Pass | None = None) -> FusedPart | None:
        return None if self.enter is not None else self._in_blocks(x, norm)

    def _in_blocks(self, x: Tensor, norm: Norm | None = None) -> FusedPart | None:
        layers = (self.up_proj,), self.down_proj
        return fused_products.feed(self, x, self.activation, *layers, norm) if self.in_blocks else None

    def forward(self, x: Float[Tensor, "*b d"], pass_: Pass | None = None) -> Float[Tensor, "*b d"]:
        x = x if self.enter is None else self.enter(x)
        at_once = self._in_blocks(x)
        if at_once is not None:
            return self.out(at_once(x))
        hidden = activated_at_once(x, self.activation, (self.up_proj, self.up))
        if hidden is None:
            hidden = self.phi(self.up(self.up_proj(x)))
        return self.out(self.down_proj(self.hidden(hidden)))


_WORDS = tuple(
    Word(name, whole("hidden"), "1024", optional=True, fields={"activation": name})
    for name in ("relu", "gelu", "gelu_tanh", "silu", "relu2")
)


class MlpConfig(FFNConfig, kind="mlp", words=_WORDS):
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "relu2"] = "gelu_tanh"
    bias: bool = True

    def width(self, ctx: BuildContext) -> int:
        return self.hidden or 4 * ctx.d_model

    def as_experts(self) -> dict[str, Any]:
        return {"gated": False, "activation": self.activation, "bias": self.bias}

    def build(self, ctx: BuildContext) -> Mlp:
        return Mlp(ctx.d_model, self.width(ctx), self.activation, self.bias, ctx.make_reparam)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        again = EXTRA_KEPT[self.activation] if self.at_once(ctx, shape) else 0  # all but the opened values
        return self.separate_costs(ctx, shape) + Cost(kept=-shape.keeps(again * self.width(ctx)))

    def at_once(self, ctx: BuildContext, shape: Shape) -> bool:
        return fused_products.counts(ctx, shape)

    def separate_costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        d, f = ctx.d_model, self.width(ctx)
        down = linear_cost(ctx, shape.reading(shape.products), f, d, bias=self.bias)
        phi = Cost(kept=shape.keeps(EXTRA_KEPT[self.activation] * f))
        return linear_cost(ctx, shape, d, f, bias=self.bias) + phi + down
