from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext, PartConfig, Value
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.init import Init, Role
from glassformer.parts.core.owner import Owner, Vocabulary
from glassformer.parts.core.shard import Shard, Shards
from glassformer.parts.core.words import Word, whole
from glassformer.parts.embedding import Embedding
from glassformer.parts.ffn.base import ACTIVATIONS, EXTRA_KEPT
from glassformer.parts.linear import Linear, linear_cost
from glassformer.parts.loss import cross_entropy, linear_cross_entropy
from glassformer.parts.norm import NormConfig
from glassformer.parts.reparam import MakeReparam

Pool = Literal["cls", "mean", "last"]


def pool(x: Float[Tensor, "b s d"], how: Pool, documents: Int[Tensor, "b s"] | None = None) -> Float[Tensor, "b d"]:
    """Returns one vector per text, (b, d): that of its first token (`how` "cls"), the mean over its tokens ("mean"), or
    that of its last ("last"). A text is the first document of a row: the tokens with the first id in `documents` other
    than 0, which is padding; `documents` None if the whole row is the text."""
    if documents is None:
        return x.mean(1) if how == "mean" else x[:, 0 if how == "cls" else -1]
    first = (documents != 0).int().argmax(1)
    own = documents == documents.gather(1, first[:, None])
    if how == "mean":
        return (x * own[..., None]).sum(1) / own.sum(1, keepdim=True)
    last = own.shape[1] - 1 - own.flip(1).int().argmax(1)
    return x[torch.arange(len(x), device=x.device), first if how == "cls" else last]


class Transform(nn.Module):
    """Transform of BERT's heads: y = norm(phi(x W + b)) of hidden states x, before the matrix of the logits; x, y (...,
    d)."""

    def __init__(
        self,
        d_model: int,
        activation: str = "gelu",
        bias: bool = True,
        norm: nn.Module | None = None,
        reparam: MakeReparam | None = None,
    ):
        super().__init__()
        self.dense = Linear(d_model, d_model, bias, reparam=reparam)
        self.norm = norm
        self.activation, self.phi = activation, torch.tanh if activation == "tanh" else ACTIVATIONS[activation]

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        y = self.phi(self.dense(x))
        return y if self.norm is None else self.norm(y)


class TransformConfig(Value):
    """Config of `Transform`, the layer of BERT's heads before the logits."""

    activation: Literal["gelu", "gelu_tanh", "relu", "silu", "tanh"] = "gelu"
    bias: bool = True
    norm: NormConfig | None = None

    def build(self, ctx: BuildContext) -> Transform:
        norm = self.norm.build(ctx) if self.norm else None
        return Transform(ctx.d_model, self.activation, self.bias, norm, ctx.make_reparam)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        d = ctx.d_model
        kept = shape.keeps((1 if self.activation == "tanh" else EXTRA_KEPT[self.activation]) * d)
        dense = linear_cost(ctx, shape, d, d, bias=self.bias) + Cost(kept=kept)
        return dense + self.norm.costs(ctx, shape) if self.norm else dense


class Head(nn.Module):
    """logits = softcap(scale x W^T + b); x (b, s, d), W (v, d), logits (b, s, v).

    A `transform` is applied to x first. With `pool`, x is one vector for each text: logits (b, c) of classes, or
    without W (`vector`) the vector itself, (b, d), with `normalize` of length 1.

    Tied, W is the embedding's table (Press & Wolf 2017, 1608.05859): the embedding is passed with the call and computes
    the matmul. softcap(z) = cap tanh(z / cap), as Gemma 2; scale is Cohere's logit_scale, and one over Granite's
    logits_scaling. In training, z_loss (log Z)^2 is added to the loss, and targets are smoothed by `smoothing`
    (`parts/loss.py`). `offset`: constants (1, v) added to the logits, loaded from a checkpoint and not trained,
    initialised to 0 (BART, Marian). `reparam` makes W from `weight` (`parts/reparam.py`); a tied W is the embedding's
    unchanged table.
    """

    decays = True
    roles: tuple[Role, ...] = ("head",)
    shards: ClassVar[Shards] = {"weight": (Shard("vocab"),), "bias": (Shard("vocab"),)}
    offset: Tensor | None
    vocabulary: Vocabulary | None = None
    """Share of the tokens, or classes, whose rows of W this tensor-parallel rank holds (`parts/core/owner.py`); None
    for all of them."""

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
        transform: nn.Module | None = None,
        pool: Pool | None = None,
        classes: int | None = None,
        vector: bool = False,
        normalize: bool = False,
    ):
        super().__init__()
        self.rows = rows = classes or vocab_size
        self.tied, self.softcap, self.scale, self.z_loss, self.smoothing = tied, softcap, scale, z_loss, smoothing
        self.transform, self.pool, self.vector, self.normalize = transform, pool, vector, normalize
        self.weight = None if tied or vector else nn.Parameter(torch.empty(rows, d_model))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.register_buffer("offset", torch.empty(1, rows) if offset else None)
        self.reparam = None if self.weight is None or reparam is None else reparam(d_model, (rows,))
        self.packed: nn.Module | None = None
        self.init_weights(Init())

    def forward(
        self,
        x: Float[Tensor, "b s d"],
        embedding: Embedding | None = None,
        targets: Int[Tensor, "b ..."] | None = None,
        reduction: str = "mean",
        documents: Int[Tensor, "b s"] | None = None,
    ) -> Tensor:
        """Returns the logits (b, s, v); with `targets`, their cross-entropy in nats, without keeping the logits: the
        mean over targets that are not -100, or with `reduction="none"` losses (b, s). A tied head needs the
        `embedding`. For pooled texts logits are (b, c) and targets (b,); `documents` gives the tokens of each text. A
        head of vectors returns them."""
        if self.pool is not None:
            x = pool(x, self.pool, documents)
        if self.transform is not None:
            x = self.transform(x)
        if targets is not None:
            return self._loss(x, embedding, targets, reduction)
        if self.vector:
            return F.normalize(x, dim=-1) if self.normalize else x
        return self._logits(x, embedding)

    def divide(self, owner: Owner) -> None:
        owner.refuse("reparam", self.reparam is not None, "makes a matrix of the whole one")
        if not self.vector:
            self.vocabulary = owner.vocabulary(self.rows)

    def _logits(self, x: Tensor, embedding: Embedding | None) -> Tensor:
        logits = self._product(self._entered(x), embedding)
        logits = logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.vocabulary is None else self.vocabulary.gather(logits)

    def _entered(self, x: Tensor) -> Tensor:
        """Returns x, scaled, as the operand of the matmul with W; tensor-parallel ranks sum its gradients."""
        x = self.scaled(x)
        return x if self.vocabulary is None else self.vocabulary.enter(x)

    def _product(self, x: Tensor, embedding: Embedding | None) -> Tensor:
        if self.packed is not None:
            return self.packed(x)
        if self.weight is None:
            return _given(embedding).unembed(x, self._added)
        return F.linear(x, self._own(self.weight), self._added)

    def _loss(self, x: Tensor, embedding: Embedding | None, targets: Tensor, reduction: str) -> Tensor:
        if self.vector:
            raise RequestError(
                "this model's head gives vectors, for which no loss is defined; use a head of tokens or of classes",
                code="conflict", field="head.vector", value=True, expected="False",
            )  # fmt: skip
        if self.packed is not None:
            return self.loss_of(self._logits(x, embedding), targets, reduction)
        rows, flat = self._entered(x).flatten(0, -2), targets.flatten()
        how: dict[str, Any] = {
            "bias": self._added, "softcap": self.softcap, "reduction": reduction, "vocabulary": self.vocabulary,
            **self._in_training,
        }  # fmt: skip
        if self.weight is None:
            loss = _given(embedding).cross_entropy(rows, flat, **how)
        else:
            loss = linear_cross_entropy(rows, self._own(self.weight), flat, **how)
        return loss if reduction == "mean" else loss.view_as(targets)

    @property
    def _added(self) -> Tensor | None:
        """Sum of the untrained offset and the trained bias that are added to the logits, (v,); None if the head has
        neither."""
        if self.offset is None:
            return self.bias
        offset = self.offset[0]
        if self.vocabulary is not None:
            offset = offset[self.vocabulary.first : self.vocabulary.last]
        return offset if self.bias is None else offset + self.bias

    def _own(self, weight: Tensor) -> Tensor:
        return weight if self.reparam is None else self.reparam(weight)

    def applied(self, embedding: Embedding | None = None) -> Tensor:
        """Returns the effective matrix W (v, d): computed from `weight`, or for a tied head the table of the
        embedding."""
        if self.weight is None:
            return _given(embedding).applied()
        return self.weight if self.reparam is None else self.reparam.applied(self.weight)

    def scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1.0 else x * self.scale

    def pack(self, packed: Callable[[Tensor, Tensor | None, tuple[int, ...]], nn.Module], embedding: Embedding) -> None:
        """Replaces the matmul of this head by a module that holds a quantised copy of W, made by `packed`
        (`parts/quantized.py`)."""
        if self.vector:
            return
        weight = self.applied(embedding)
        self.packed = packed(weight, self._added, (len(weight),))
        self.weight = self.bias = self.offset = self.reparam = None

    def loss_of(
        self, logits: Float[Tensor, "b ... v"], targets: Int[Tensor, "b ..."], reduction: str = "mean"
    ) -> Tensor:
        """Returns the cross-entropy in nats of logits that are already computed."""
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


def _pool(word: str, text: str) -> str:
    if text not in get_args(Pool):
        known = ", ".join(get_args(Pool))
        raise RequestError(f"{word}:{text}: use one of {known}", code="unknown", field=word, value=text, expected=known)
    return text


_VECTORS: dict[str, Any] = {
    "tied": False, "bias": False, "softcap": None, "z_loss": 0.0, "transform": None, "classes": None, "vector": True,
    "normalize": True, "labels": None,
}  # fmt: skip
_CLASSES: dict[str, Any] = {"tied": False, "vector": False, "normalize": False, "labels": None}


class HeadConfig(
    PartConfig,
    axis="head",
    kind="head",
    words=(
        Word("tied", fields={"tied": True}),
        Word("untied", fields={"tied": False}),
        Word("pooled", lambda word, text: {"pool": _pool(word, text)}, "mean", fields=_VECTORS),
        Word("classes", whole("classes"), "2", fields={**_CLASSES, "pool": "cls"}),
        Word("spans", fields={**_CLASSES, "pool": None, "classes": 2, "transform": None}),
    ),
):
    tied: bool = False
    bias: bool = False
    softcap: float | None = Field(None, gt=0)
    scale: float | None = Field(None, gt=0)
    """Factor on logits; None for 1. Under muP it is multiplied by base width / width."""
    z_loss: float = Field(0.0, ge=0)
    smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the probability of each training target that is spread evenly over all tokens."""
    offset: bool = False
    """True if the logits have an untrained offset, loaded from a checkpoint."""

    transform: TransformConfig | None = None
    """Layer applied to hidden states before W, as in BERT; None without one."""
    pool: Pool | None = None
    """Pooling to one vector for each text: that of the first token, the mean, or that of the last; None for one per
    token."""
    classes: int | None = Field(None, gt=0, le=1 << 20)
    """Number c of rows of W, one for each class; None for one for each token of the vocabulary."""
    labels: tuple[str, ...] | None = None
    """Names of the classes, one for each row of W; None for classes without names."""
    vector: bool = False
    """True if W is absent, and the outputs are the pooled vectors themselves."""
    normalize: bool = False
    """True if output vectors are normalised to length 1."""

    @model_validator(mode="after")
    def _consistent(self) -> HeadConfig:
        if self.tied and self.classes:
            raise RequestError(
                f"classes={self.classes} have no rows in the embedding, so tied must be False",
                code="conflict", field="tied", value=self.tied,
            )  # fmt: skip
        if self.labels is not None and len(self.labels) != self.classes:
            raise RequestError(
                f"labels has {len(self.labels)} names and classes={self.classes}; give a name for each class",
                code="conflict", field="labels", value=len(self.labels), expected=str(self.classes),
            )  # fmt: skip
        if self.vector and (self.tied or self.bias or self.classes or self.softcap or self.z_loss):
            raise RequestError(
                "vector=True gives no logits: tied, bias, classes, softcap and z_loss have no meaning",
                code="conflict", field="vector", value=self.vector,
            )  # fmt: skip
        if self.normalize and not self.vector:
            raise RequestError(
                "normalize=True is for vectors; set vector=True",
                code="conflict", field="normalize", value=self.normalize,
            )  # fmt: skip
        return self

    @property
    def predicts_tokens(self) -> bool:
        """True if the outputs are logits of the vocabulary for each token."""
        return not (self.vector or self.pool or self.classes)

    @property
    def gives(self) -> Literal["tokens", "classes", "spans", "vectors", "values"]:
        """Kind of output: logits of tokens, logits of classes for a text, logits of starts and ends of spans for each
        token, vectors, or other values for each token."""
        if self.vector:
            return "vectors"
        if self.classes is None:
            return "classes" if self.pool else "tokens"
        return "classes" if self.pool else "spans" if self.classes == 2 else "values"

    def build(self, ctx: BuildContext) -> Head:
        return Head(
            ctx.vocab_size, ctx.d_model, self.tied, self.bias, self.softcap, self._scale(ctx),
            self.z_loss, reparam=ctx.make_reparam, smoothing=self.smoothing, offset=self.offset,
            transform=self.transform.build(ctx) if self.transform else None,
            pool=self.pool, classes=self.classes, vector=self.vector, normalize=self.normalize,
        )  # fmt: skip

    def resolved(self, ctx: BuildContext) -> HeadConfig:
        return self.replace(scale=self._scale(ctx), z_loss=0.0, smoothing=0.0)

    def _scale(self, ctx: BuildContext) -> float:
        return (self.scale or 1.0) * (ctx.mup.ratio(ctx.d_model) if ctx.mup else 1.0)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the head. The loss keeps its gradients by x, W and b, and no logits. A tied W counts with
        the embedding."""
        d, v = ctx.d_model, self.classes or ctx.vocab_size
        if self.pool is not None:
            shape = replace(shape, s=1)
        before = self.transform.costs(ctx, shape) if self.transform else Cost()
        if self.vector:
            return before
        whole = linear_cost(ctx.within(reparam=None) if self.tied else ctx, shape, d, v, bias=self.bias)
        own = whole.parameters - (d * v if self.tied else 0)
        kept = shape.keeps(d, shape.dtype) + shape.keeps_once((d + self.bias) * v, shape.dtype)
        return before + replace(whole, parameters=own, active_parameters=own, kept=kept)
