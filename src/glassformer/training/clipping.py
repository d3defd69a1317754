"""The norm of a model's gradients, and its bound."""

from __future__ import annotations

import torch
from torch import nn

from glassformer.parallel.sums import local


def gradient_norm(model: nn.Module) -> float:
    """||g|| over all parameters."""
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def clip(model: nn.Module, limit: float | None, norm: float) -> None:
    """Scales gradients of norm `norm` down to `limit` where that is less; touches nothing otherwise."""
    if limit is not None and norm > limit:
        here = [local(p.grad) for p in model.parameters() if p.grad is not None]
        scale = (limit / (torch.tensor(norm) + 1e-6)).clamp(max=1.0)  # as torch does, of whole and divided ones alike
        torch._foreach_mul_(here, scale.to(here[0].device))
