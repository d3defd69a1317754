from __future__ import annotations

import torch
from pydantic import Field

from glassformer.model import Model
from glassformer.training.optimizers.base import Beta, Eager, Groups, OptimizerConfig


class AdamW(Eager, torch.optim.AdamW):
    """AdamW of torch, never compiled."""


class AdamWConfig(OptimizerConfig, kind="adamw"):
    """Adam with decoupled weight decay, fused. Loshchilov & Hutter 2017, 1711.05101.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr (m' / (sqrt(v') + eps) + decay w), where
    m' = m / (1 - b1^t) and v' = v / (1 - b2^t).
    """

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """b2 of GPT-3 and later models; torch's 0.999 averages over more steps than a short run has."""
    eps: float = Field(1e-8, gt=0)

    def state_values(self, model: Model) -> dict[str, int]:
        return {name: 2 * weight.numel() for name, weight in model.named_parameters()}

    def over_groups(self, groups: Groups, model: Model) -> torch.optim.Optimizer:
        return AdamW(groups, betas=self.betas, eps=self.eps, fused=True)
