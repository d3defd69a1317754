"""A product that ends with the activation: one pass of oneDNN where three operations would read and write it thrice.

For bf16 read on a CPU, where nobody learns. Its result is rounded less often than that of the three.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glassformer.parts.core.site import Site
from glassformer.parts.linear import Linear
from glassformer.parts.precision import onednn_in_bf16

ENDINGS = {
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "sigmoid": ("sigmoid", ""),
}
"""The activations it knows, in its words: name and algorithm."""
ROWS = 32
"""From so many tokens on a product is bound by arithmetic, and what surrounds it by memory."""


def can_end(x: Tensor, activation: str, linears: tuple[Linear, ...], sites: tuple[Site, ...]) -> bool:
    """Whether `ended` or `gated_end` serves x (..., s, i) here; nobody may change what passes at `sites` between."""
    return (
        activation in ENDINGS
        and x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and x.dim() > 1
        and x.shape[-2] >= ROWS
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")  # whose rounding is that of training, wherever the weights lie
        and not torch.compiler.is_compiling()
        and all((w := one.operand) is not None and w.dtype == x.dtype for one in linears)
        and not any(site.edited for site in sites)
        and onednn_in_bf16()
    )


def ended(x: Tensor, linear: Linear, activation: str) -> Tensor:
    """phi(x W^T + b), x (..., i) -> (..., o)."""
    name, algorithm = ENDINGS[activation]
    return torch.ops.mkldnn._linear_pointwise(x, linear.operand, linear.bias, name, [], algorithm)


def gated_end(x: Tensor, gate: Linear, up: Linear, activation: str) -> Tensor:
    """phi(x W_gate^T + b) * (x W_up^T + b), x (..., d) -> (..., f)."""
    opened = ended(x, gate, activation)
    return torch.ops.mkldnn._linear_pointwise.binary(x, opened, up.operand, up.bias, "mul")
