from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from glassformer.parts.base import BuildContext, PartConfig
from glassformer.parts.cost import Cost, Shape
from glassformer.parts.embedding import Embedding
from glassformer.parts.init import Init, Role
from glassformer.parts.linear import linear_cost
from glassformer.parts.loss import cross_entropy, linear_cross_entropy
from glassformer.parts.reparam import MakeReparam
from glassformer.parts.shard import Shard, Shards
from glassformer.parts.words import Word


class Head(nn.Module):
    """logits = softcap(scale x W^T + b); x (b, s, d), W (v, d), logits (b, s, v).

    Tied, W is the embedding's table (Press & Wolf 2017, 1608.05859): the embedding comes with the call and computes the
    product.
    softcap(z) = cap tanh(z / cap), as Gemma 2; scale is Cohere's logit_scale, and one over Granite's logits_scaling.
    While training, the loss has z_loss (log Z)^2 on top, and targets are smoothed by `smoothing` (`parts/loss.py`).
    `offset`: numbers (1, v) added to the logits that a checkpoint brings and training leaves alone, 0 at first (BART,
    Marian).
    `reparam` makes a W of its own from `weight` (`parts/reparam.py`); a tied one is the embedding's table as it is.
    """

    decays = True
    roles: tuple[Role, ...] = ("head",)
    shards: ClassVar[Shards] = {"weight": (Shard("vocab"),), "bias": (Shard("vocab"),)}
    offset: Tensor | None

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        tied: bool = False,
        bias: bool = False,
        softcap: float | None = None,
        scale: float = 1.0,
        z_loss: float = 0.0,
        reparam: MakeReparam | None = None,
        smoothing: float = 0.0,
        offset: bool = False,
    ):
        super().__init__()
        self.tied, self.softcap, self.scale, self.z_loss, self.smoothing = tied, softcap, scale, z_loss, smoothing
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, d_model))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        self.register_buffer("offset", torch.empty(1, vocab_size) if offset else None)
        self.reparam = None if tied or reparam is None else reparam(d_model, (vocab_size,))
        self.packed: nn.Module | None = None
        self.init_weights(Init())

    def forward(
        self,
        x: Float[Tensor, "b s d"],
        embedding: Embedding | None = None,
        targets: Int[Tensor, "b s"] | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Logits (b, s, v), or with `targets` their cross-entropy in nats, without keeping the logits: the mean over
        targets that are not -100; `reduction="none"` gives (b, s) losses. A tied head needs the `embedding`."""
        if targets is not None:
            return self._loss(x, embedding, targets, reduction)
        logits = self._product(self.scaled(x), embedding)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _product(self, x: Tensor, embedding: Embedding | None) -> Tensor:
        if self.packed is not None:
            return self.packed(x)
        if self.weight is None:
            return _given(embedding).unembed(x, self._added)
        return F.linear(x, self._own(self.weight), self._added)

    def _loss(self, x: Tensor, embedding: Embedding | None, targets: Tensor, reduction: str) -> Tensor:
        if self.packed is not None:
            return self.loss_of(self(x), targets, reduction)
        rows, flat = self.scaled(x).flatten(0, 1), targets.flatten()
        how: dict[str, Any] = {
            "bias": self._added, "softcap": self.softcap, "reduction": reduction, **self._in_training
        }  # fmt: skip
        if self.weight is None:
            loss = _given(embedding).cross_entropy(rows, flat, **how)
        else:
            loss = linear_cross_entropy(rows, self._own(self.weight), flat, **how)
        return loss if reduction == "mean" else loss.view_as(targets)

    @property
    def _added(self) -> Tensor | None:
        """What is added to each token's logit."""
        if self.offset is None:
            return self.bias
        return self.offset[0] if self.bias is None else self.offset[0] + self.bias

    def _own(self, weight: Tensor) -> Tensor:
        return weight if self.reparam is None else self.reparam(weight)

    def applied(self, embedding: Embedding | None = None) -> Tensor:
        """W (v, d): what is made from `weight`, or the table of the embedding that it is tied to."""
        if self.weight is None:
            return _given(embedding).applied()
        return self.weight if self.reparam is None else self.reparam.applied(self.weight)

    def scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1.0 else x * self.scale

    def pack(self, packed: Callable[[Tensor, Tensor | None, tuple[int, ...]], nn.Module], embedding: Embedding) -> None:
        """Logits from now on come from a quantised copy of the matrix (`parts/quantized.py`)."""
        weight = self.applied(embedding)
        self.packed = packed(weight, self._added, (len(weight),))
        self.weight = self.bias = self.offset = self.reparam = None

    def loss_of(self, logits: Float[Tensor, "b s v"], targets: Int[Tensor, "b s"], reduction: str = "mean") -> Tensor:
        """The cross-entropy of logits that were made."""
        return cross_entropy(logits, targets, reduction, **self._in_training)

    @property
    def _in_training(self) -> dict[str, float]:
        return {"z_loss": self.z_loss, "smoothing": self.smoothing} if self.training else {}

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        if self.weight is not None:
            init.fill(self.weight, "head")
            if self.reparam is not None:
                self.reparam.begin(self.weight)
        if self.bias is not None:
            self.bias.zero_()
        if self.offset is not None:
            self.offset.zero_()


def _given(embedding: Embedding | None) -> Embedding:
    if embedding is None:
        raise TypeError("a tied head computes its logits with the embedding; call it as head(x, embedding)")
    return embedding


class HeadConfig(
    PartConfig,
    axis="head",
    kind="head",
    words=(Word("tied", fields={"tied": True}), Word("untied", fields={"tied": False})),
):
    tied: bool = False
    bias: bool = False
    softcap: float | None = Field(None, gt=0)
    scale: float | None = Field(None, gt=0)
    """None: 1. Under muP, times base width / width."""
    z_loss: float = Field(0.0, ge=0)
    smoothing: float = Field(0.0, ge=0, lt=1)
    """How much of a target in training is spread over all tokens."""
    offset: bool = False
    """Whether a checkpoint brings numbers that are added to the logits and not trained."""

    def build(self, ctx: BuildContext) -> Head:
        return Head(
            ctx.vocab_size, ctx.d_model, self.tied, self.bias, self.softcap, self._scale(ctx), self.z_loss,
            reparam=ctx.make_reparam, smoothing=self.smoothing, offset=self.offset,
        )  # fmt: skip

    def explicit(self, ctx: BuildContext) -> HeadConfig:
        return self.vary(scale=self._scale(ctx), z_loss=0.0, smoothing=0.0)

    def _scale(self, ctx: BuildContext) -> float:
        return (self.scale or 1.0) * (ctx.mup.ratio(ctx.d_model) if ctx.mup else 1.0)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """The loss keeps its gradients by x, W and b, and no logits. A tied W counts with the embedding."""
        d, v = ctx.d_model, ctx.vocab_size
        whole = linear_cost(ctx.within(reparam=None) if self.tied else ctx, shape, d, v, bias=self.bias)
        own = whole.parameters - (d * v if self.tied else 0)
        kept = shape.keeps(d, shape.dtype) + shape.keeps_once((d + self.bias) * v, shape.dtype)
        return replace(whole, parameters=own, active_parameters=own, kept=kept)
