"""Fused activations: in inference, a matmul with its activation in one operation; in training, a gating (phi(gate) *
up) that keeps few tensors for the backward pass.

For bf16 on a CPU, without gradients, oneDNN computes the matmul, bias and activation in one pass instead of three that
each read and write the result. The result is then rounded less often.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.parts import fused_loops
from glassformer.parts.core.site import Site
from glassformer.parts.first_order import first_order
from glassformer.parts.linear import Linear
from glassformer.parts.precision import slow_in_bf16, wide
from glassformer.parts.region import region

ENDINGS = {
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "sigmoid": ("sigmoid", ""),
}
"""Mapping {activation: (its name in oneDNN, oneDNN's algorithm)} of the activations that oneDNN can fuse with a
matmul."""
ROWS = 32
"""Least number of tokens for which fusion saves time: matmuls are then bound by arithmetic, elementwise operations by
memory."""

Product = tuple[Linear, Site]
"""Tuple of a linear layer and the site of its result."""


def activated_at_once(x: Tensor, activation: str, up: Product) -> Tensor | None:
    """Returns phi(x W^T + b) (..., o) of x (..., i), with W and b of the layer in `up`, in one pass of oneDNN; None if
    oneDNN cannot compute this here."""
    if not _serves(x, activation, up):
        return None
    _show(x, up)
    return _ended(x, up[0], activation)


def gated_at_once(x: Tensor, activation: str | None, gate: Product, up: Product) -> Tensor | None:
    """Returns phi(x W_gate^T + b) * (x W_up^T + b) (..., f) of x (..., d) in two passes of oneDNN; None if oneDNN
    cannot compute this here."""
    if not _serves(x, activation, gate, up):
        return None
    _show(x, gate, up)
    assert activation is not None
    opened, linear = _ended(x, gate[0], activation), up[0]
    return torch.ops.mkldnn._linear_pointwise.binary(x, opened, linear.operand, linear.bias, "mul")


def _serves(x: Tensor, activation: str | None, *products: Product) -> bool:
    """Returns True if oneDNN can compute these layers for x (..., s, i) with this activation, and nothing edits one of
    their results."""
    return (
        activation in ENDINGS
        and x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and x.dim() > 1
        and x.shape[-2] >= ROWS
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")  # autocast's rounding is that of training, for any weights
        and not torch.compiler.is_compiling()
        and all((w := linear.operand) is not None and w.dtype == x.dtype for linear, _ in products)
        and not any(site.edited for _, site in products)
        and not slow_in_bf16("cpu")
    )


def _show(x: Tensor, *products: Product) -> None:
    """Computes the result of each layer separately, if its site has observers, and shows it to them, because the fused
    pass does not produce it."""
    if any(site.watched for _, site in products):
        for linear, site in products:
            site(linear(x))


def _ended(x: Tensor, linear: Linear, activation: str) -> Tensor:
    name, algorithm = ENDINGS[activation]
    return torch.ops.mkldnn._linear_pointwise(x, linear.operand, linear.bias, name, [], algorithm)


# Gatings


@region
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(wide(gate)) * wide(up)).to(gate.dtype)


@region
def _swiglu_grad(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    d, g = wide(grad), wide(gate)
    s = torch.sigmoid(g)  # once: each exponential takes as long as five products
    silu = g * s
    slope = torch.addcmul(s, silu, 1 - s)
    return slope.mul_(d).mul_(wide(up)).to(gate.dtype), silu.mul_(d).to(gate.dtype)


class _SwiGlu(torch.autograd.Function):
    """Autograd function of silu(gate) * up, keeping only gate and up for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y = fused_loops.swiglu(gate, up)
        return _swiglu(gate, up) if y is None else y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        given = grads[0], *ctx.saved_tensors
        return fused_loops.swiglu_grad(*given) or _swiglu_grad(*given)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up, keeping only gate and up for the backward pass."""
    if torch.is_grad_enabled():
        return _SwiGlu.apply(gate, up)
    if (y := fused_loops.swiglu(gate, up)) is not None:
        return y
    if gate.dtype != wide(gate[:0]).dtype:  # torch's silu rounds twice, and is faster than three passes in fp32
        return (F.silu(gate) * up).to(gate.dtype)
    return _swiglu(gate, up)


@region
def _clamped(gate: Tensor, up: Tensor, limit: float, alpha: float, shift: float) -> Tensor:
    g, u = wide(gate).clamp(max=limit), wide(up).clamp(-limit, limit)
    return (g * torch.sigmoid(alpha * g) * (u + shift)).to(gate.dtype)


@region
def _clamped_grad(
    grad: Tensor, gate: Tensor, up: Tensor, limit: float, alpha: float, shift: float
) -> tuple[Tensor, Tensor]:
    d, a, b = wide(grad), wide(gate), wide(up)
    g, u = a.clamp(max=limit), b.clamp(-limit, limit)
    s = torch.sigmoid(alpha * g)
    grad_gate = d * (u + shift) * (s + alpha * g * s * (1 - s)) * (a <= limit)
    return grad_gate.to(gate.dtype), (d * g * s * (b.abs() <= limit)).to(gate.dtype)


class _ClampedGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float, alpha: float, shift: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.numbers = limit, alpha, shift
        return _clamped(gate, up, limit, alpha, shift)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*_clamped_grad(grads[0], *ctx.saved_tensors, *ctx.numbers), None, None, None)


def clamped_glu(gate: Tensor, up: Tensor, limit: float, alpha: float, shift: float) -> Tensor:
    """Returns the result of `naive_clamped_glu`, keeping only gate and up for the backward pass."""
    numbers = limit, alpha, shift
    return _ClampedGlu.apply(gate, up, *numbers) if torch.is_grad_enabled() else _clamped(gate, up, *numbers)
