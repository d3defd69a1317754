from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from glassformer.parts.base import BuildContext, PartConfig
from glassformer.parts.init import Init
from glassformer.parts.loss import cross_entropy, linear_cross_entropy


class Head(nn.Module):
    """logits = softcap(scale x W^T + b); x (b, s, d), W (v, d), logits (b, s, v).

    Tied, W is the embedding's own parameter (Press & Wolf 2017, 1608.05859); it then comes with the call.
    softcap(z) = cap tanh(z / cap), as Gemma 2; scale is Cohere's logit_scale, and one over Granite's logits_scaling.
    """

    decays = True

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        tied: bool = False,
        bias: bool = False,
        softcap: float | None = None,
        scale: float = 1.0,
    ):
        super().__init__()
        self.tied, self.softcap, self.scale = tied, softcap, scale
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, d_model))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        self.packed: nn.Module | None = None
        self.init_weights(Init())

    def forward(self, x: Float[Tensor, "b s d"], embedding: Float[Tensor, "v d"]) -> Float[Tensor, "b s v"]:
        if self.packed is not None:
            logits = self.packed(self.scaled(x))
        else:
            logits = F.linear(self.scaled(x), embedding if self.weight is None else self.weight, self.bias)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1.0 else x * self.scale

    def pack(self, packed: Callable[[Tensor, Tensor | None, tuple[int, ...]], nn.Module], embedding: Tensor) -> None:
        """Logits from now on come from a quantised copy of the matrix (`parts/quantized.py`)."""
        weight = embedding if self.weight is None else self.weight
        self.packed = packed(weight, self.bias, (len(weight),))
        self.weight = self.bias = None

    def loss(
        self,
        x: Float[Tensor, "b s d"],
        embedding: Float[Tensor, "v d"],
        targets: Int[Tensor, "b s"],
        reduction: str = "mean",
    ) -> Tensor:
        """Mean cross-entropy in nats over targets that are not -100, without keeping the logits.

        `reduction="none"` gives (b, s) losses."""
        if self.packed is not None:
            return cross_entropy(self(x, embedding), targets, reduction)
        weight = embedding if self.weight is None else self.weight
        x = self.scaled(x).flatten(0, 1)
        loss = linear_cross_entropy(x, weight, targets.flatten(), self.bias, self.softcap, reduction)
        return loss if reduction == "mean" else loss.view_as(targets)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        if self.weight is not None:
            init.fill(self.weight, "head")
        if self.bias is not None:
            self.bias.zero_()


class HeadConfig(PartConfig, axis="head", kind="head"):
    tied: bool = False
    bias: bool = False
    softcap: float | None = Field(None, gt=0)
    scale: float | None = Field(None, gt=0)
    """None: 1."""

    def build(self, ctx: BuildContext) -> Head:
        return Head(ctx.vocab_size, ctx.d_model, self.tied, self.bias, self.softcap, self.scale or 1.0)

    def explicit(self, ctx: BuildContext) -> HeadConfig:
        return self.vary(scale=self.scale or 1.0)

    def num_params(self, ctx: BuildContext) -> int:
        return (0 if self.tied else ctx.vocab_size * ctx.d_model) + (ctx.vocab_size if self.bias else 0)

    def flops(self, ctx: BuildContext, t: float) -> float:
        return 2.0 * ctx.vocab_size * ctx.d_model
