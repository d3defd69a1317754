from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.owner import Seam
from glassformer.parts.linear import Matrix, matrices_of
from glassformer.parts.precision import wide
from glassformer.parts.region import region

Activation = Callable[[Tensor], Tensor]

# gelu_tanh(x) = x (1 + tanh z) / 2 = x sigmoid(2 z), z = sqrt(2/pi) (x + 0.044715 x^3): an exponential is cheap where
# a tanh is not (docs/log.md, 2026-11-21).
_SLOPE, _CUBE = 2 * 0.7978845608028654, 0.044715


@region
def _gelu_tanh(x: Tensor) -> Tensor:
    u = wide(x)
    return (u * torch.sigmoid(_SLOPE * (u + _CUBE * u * u * u))).to(x.dtype)


@region
def _gelu_tanh_grad(grad: Tensor, x: Tensor) -> Tensor:
    u = wide(x)
    s = torch.sigmoid(_SLOPE * (u + _CUBE * u * u * u))
    return (wide(grad) * (s + u * s * (1 - s) * (_SLOPE * (1 + 3 * _CUBE * u * u)))).to(x.dtype)


class _GeluTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gelu_tanh(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _gelu_tanh_grad(grads[0], *ctx.saved_tensors)


def gelu_tanh(x: Tensor) -> Tensor:
    """Returns `F.gelu(x, approximate="tanh")`, keeping only x for the backward pass."""
    return _GeluTanh.apply(x)


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "relu2": relu2,
    "sigmoid": torch.sigmoid,
}


EXTRA_KEPT = {"relu": 0, "sigmoid": 0, "gelu": 1, "gelu_tanh": 1, "silu": 1, "relu2": 1}
"""Elements that each activation keeps for the backward pass beyond its result."""


class FFN(nn.Module):
    """Feed-forward network: forward(x (b,s,d), pass_) -> (b,s,d), for every token separately, or at least independent
    of later tokens if `causal`. The pass marks padding for an FFN that counts tokens; without a pass, no token is
    padding."""

    causal: bool = True
    """True if no output depends on later tokens."""
    separates_documents: bool = True
    """True if no output depends on tokens of other documents."""
    by_token: bool = False
    """True if each output depends only on its token."""
    enter: Seam | None = None
    """Function applied to x first, if several owners share the FFN (`parts/core/owner.py`)."""

    @property
    def spreads(self) -> bool:
        """True if processes may share the tokens of a sequence, as those of a batch."""
        return self.by_token

    def matrices(self) -> dict[str, Matrix]:
        """Returns weight matrices by the name of the site each makes, or of its parameter."""
        return matrices_of(self)


def _matched(hidden: int | None, before: int, after: int) -> int | None:
    """Returns the width at which `after` matrices have the weights of `before`; a smaller width is rounded up to 8."""
    if hidden is None or before == after:
        return hidden
    return -(-before * hidden // (8 * after)) * 8 if after > before else round(hidden * before / after)


class FFNConfig(PartConfig, axis="ffn"):
    hidden: int | None = Field(None, gt=0, le=1 << 24)
    """Width f of the hidden layer; None for the width that keeps 8 d^2 weights."""
    causal: ClassVar[bool] = True
    """True if no output depends on later tokens."""

    @abstractmethod
    def build(self, ctx: BuildContext) -> FFN:
        """Returns the module: forward(x (b, s, d), pass_) -> (b, s, d), d = `ctx.d_model`, with a hidden layer of
        `width(ctx)`. Raises RequestError for an impossible width."""

    @abstractmethod
    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns parameters, FLOPs (2 for each multiplication with an addition) and bytes for this shape."""

    @abstractmethod
    def width(self, ctx: BuildContext) -> int:
        """Returns `hidden`, or its default."""

    def divided(self, ctx: BuildContext, owners: int) -> FFNConfig:
        """Returns the config of one owner's share: an FFN with its part of the hidden layer."""
        return self.replace(hidden=self.width(ctx) // owners)

    def check_built(self, ffn: FFN) -> None:
        """Raises RequestError unless the module that this config builds is an FFN."""
        if not isinstance(ffn, FFN):
            name = type(ffn).__name__
            raise RequestError(
                f"ffn kind={self.kind} builds a {name}; its class must derive from glassformer.parts.ffn.FFN",
                code="type", field="ffn", value=name, expected="a subclass of FFN",
            )  # fmt: skip

    def n_matrices(self) -> int:
        """Returns the number of matrices of d x hidden weights, so that a change of kind can keep the number of
        weights."""
        return 2

    def as_experts(self) -> dict[str, Any] | None:
        """Returns the fields of an `ExpertsConfig` whose experts equal this network; None if experts cannot."""
        return None

    def absorbing(self, new: FFNConfig, hidden: int | None) -> FFNConfig | None:
        """Returns this network with the kind of `new` inside it, in place of `new`; None if it has no networks
        inside."""
        return None

    def with_bias(self, bias: bool) -> Any:
        """Returns the config with or without biases on its matrices, if it has the choice."""
        return self.replace(bias=bias) if "bias" in type(self).model_fields else self

    @classmethod
    def replacing(cls, old: FFNConfig | None, **fields: Any) -> FFNConfig | None:
        """Returns this kind in place of `old`. Keeps the number of weights (three matrices of 2/3 the width for two,
        and back) and the biases, chosen or not. Experts stay experts."""
        size = fields.pop("hidden", None)
        if type(old) is cls:
            return old.replace(**fields, hidden=size or old.hidden)
        carried = {"bias": getattr(old, "bias", False)} if "bias" in cls.model_fields else {}
        new = cls(**{**cls.kept_of(old), **carried, **fields, "hidden": None})
        if old is None:
            return new.replace(hidden=size)
        hidden = size or _matched(old.hidden, old.n_matrices(), new.n_matrices())
        return old.absorbing(new, hidden) or new.replace(hidden=hidden)

    def resolved(self, ctx: BuildContext) -> Any:
        return self.replace(hidden=self.width(ctx))
