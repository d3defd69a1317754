from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from glassformer.parts.base import BuildContext, PartConfig
from glassformer.parts.init import Init
from glassformer.parts.loss import linear_cross_entropy


class Head(nn.Module):
    """logits = softcap(x W^T + b); x (b, s, d), W (v, d), logits (b, s, v).

    Tied, W is the embedding's own parameter (Press & Wolf 2017, 1608.05859); it then comes with the call.
    softcap(z) = cap tanh(z / cap), as Gemma 2.
    """

    decays = True

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        tied: bool = False,
        bias: bool = False,
        softcap: float | None = None,
    ):
        super().__init__()
        self.tied, self.softcap = tied, softcap
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, d_model))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        self.init_weights(Init())

    def forward(self, x: Float[Tensor, "b s d"], embedding: Float[Tensor, "v d"]) -> Float[Tensor, "b s v"]:
        logits = F.linear(x, embedding if self.weight is None else self.weight, self.bias)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def loss(
        self,
        x: Float[Tensor, "b s d"],
        embedding: Float[Tensor, "v d"],
        targets: Int[Tensor, "b s"],
        reduction: str = "mean",
    ) -> Tensor:
        """Mean cross-entropy in nats over targets that are not -100, without keeping the logits."""
        weight = embedding if self.weight is None else self.weight
        return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), self.bias, self.softcap, reduction)

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

    def build(self, ctx: BuildContext) -> Head:
        return Head(ctx.vocab_size, ctx.d_model, self.tied, self.bias, self.softcap)

    def num_params(self, ctx: BuildContext) -> int:
        return (0 if self.tied else ctx.vocab_size * ctx.d_model) + (ctx.vocab_size if self.bias else 0)

    def flops(self, ctx: BuildContext, t: float) -> float:
        return 2.0 * ctx.vocab_size * ctx.d_model
