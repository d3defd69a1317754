from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts import fused_loops
from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.owner import Seam
from glassformer.parts.first_order import first_order
from glassformer.parts.forward_pass import Pass
from glassformer.parts.fused_products import FusedPart
from glassformer.parts.linear import Matrix, matrices_of
from glassformer.parts.norm import Norm
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
        y = fused_loops.gelu_tanh(x)
        return _gelu_tanh(x) if y is None else y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        given = grads[0], *ctx.saved_tensors
        grad = fused_loops.gelu_tanh_grad(*given)
        return _gelu_tanh_grad(*given) if grad is None else grad


def gelu_tanh(x: Tensor) -> Tensor:
    """Returns the activation `F.gelu(x, approximate="tanh")` of x; only x is kept for the backward pass."""
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
"""Mapping {activation: number of elements that it keeps for the backward pass, per element of its input, beyond its
result}."""


class FFN(nn.Module):
    """Base of feed-forward networks: forward(x (b,s,d), pass_) -> (b,s,d), for every token separately, or at least
    independent of later tokens if `causal`. The pass marks padding for an FFN that counts tokens; without a pass, no
    token is padding."""

    causal: bool = True
    """True if no output depends on later tokens."""
    separates_documents: bool = True
    """True if no output depends on tokens of other documents."""
    by_token: bool = False
    """True if each output depends only on the token at its position."""
    in_blocks: bool = False
    """True if `added_at_once` may give a fused part."""
    enter: Seam | None = None
    """Function applied to x first, if tensor-parallel ranks share the FFN (`parts/core/owner.py`); None for one
    rank."""

    @property
    def spreads(self) -> bool:
        """True if several processes may each compute some tokens of a sequence, as they compute some sequences of a
        batch."""
        return self.by_token

    def added_at_once(self, x: Tensor, norm: Norm, pass_: Pass | None = None) -> FusedPart | None:
        """Returns x + self(norm(x)) as a fused part of a training step for tensors like x; None if this network
        or the machine has no such part."""
        return None

    def matrices(self) -> dict[str, Matrix]:
        """Returns {name: weight matrix} of this FFN; a name is that of the site with the matrix's result, or else of
        its parameter."""
        return matrices_of(self)


def _matched(hidden: int | None, before: int, after: int) -> int | None:
    """Returns the width at which `after` matrices together have the number of weights of `before` matrices of width
    `hidden`; a smaller width is rounded up to a multiple of 8. None for a `hidden` of None."""
    if hidden is None or before == after:
        return hidden
    return -(-before * hidden // (8 * after)) * 8 if after > before else round(hidden * before / after)


class FFNConfig(PartConfig, axis="ffn"):
    hidden: int | None = Field(None, gt=0, le=1 << 24)
    """Width f of the hidden layer; None for the width with which the matrices together have 8 d^2 weights."""
    causal: ClassVar[bool] = True
    """True if no output of the FFN depends on later tokens."""

    @abstractmethod
    def build(self, ctx: BuildContext) -> FFN:
        """Returns the FFN: forward(x (b, s, d), pass_) -> (b, s, d), d = `ctx.d_model`, with a hidden layer of
        `width(ctx)`. Raises RequestError for an impossible width."""

    @abstractmethod
    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns parameters, FLOPs (2 for each multiplication with an addition) and bytes of the FFN for the workload
        `shape`."""

    def at_once(self, ctx: BuildContext, shape: Shape) -> bool:
        """Returns True if a step of this workload computes the network in one operation."""
        return False

    def separate_costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the costs of this FFN with its layers and loops as separate operations, which keep the hidden values
        that one operation makes again."""
        return self.costs(ctx, shape)

    @abstractmethod
    def width(self, ctx: BuildContext) -> int:
        """Returns the width f of the hidden layer: `hidden`, or its default for this model."""

    def divided(self, ctx: BuildContext, owners: int) -> FFNConfig:
        """Returns the config of an FFN with 1/`owners` of the hidden layer: the share of one of `owners`
        tensor-parallel ranks."""
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
        """Returns the number of d x hidden matrices that this network has, so that a change to another kind can keep
        the number of weights."""
        return 2

    def as_experts(self) -> dict[str, Any] | None:
        """Returns the fields of an `ExpertsConfig` whose experts are FFNs like this one; None if experts cannot be."""
        return None

    def absorbing(self, new: FFNConfig, hidden: int | None) -> FFNConfig | None:
        """Returns this config with its inner FFNs (its experts) changed to the kind of `new`, for a model whose FFN is
        replaced by `new`; None for an FFN without inner ones, so that `new` replaces all of it."""
        return None

    def with_bias(self, bias: bool) -> Any:
        """Returns this config with biases on or off; unchanged if this kind of FFN has no field `bias`."""
        return self.replace(bias=bias) if "bias" in type(self).model_fields else self

    @classmethod
    def replacing(cls, old: FFNConfig | None, **fields: Any) -> FFNConfig | None:
        """Returns a config of this kind to replace `old`, with the given `fields`. The number of weights stays (three
        matrices of 2/3 the width for two, and the reverse), and so do the biases. If `old` has experts, the result has
        experts of this kind. The width is the default for an `old` of None, a model without an FFN."""
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
