from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch
from pydantic import Field

from glassformer.model import Model
from glassformer.parts.mup import parameter_groups
from glassformer.training.optimizers.base import Eager, Groups, OptimizerConfig


class Adafactor(Eager, torch.optim.Adafactor):
    """Adafactor of torch, never compiled."""


class AdafactorConfig(OptimizerConfig, kind="adafactor"):
    """Adam with the second moment as row and column means: n + m values of state for a (n, m) matrix, not 2 n m.
    Shazeer & Stern 2018, 1804.04235, without momentum.

    u = g / sqrt(v), v the product of row and column means of g^2;  w -= lr max(eps, RMS(w)) u / max(1, RMS(u) / clip)

    The learning rate is relative to the size of the weights, at most 1 / sqrt(t) at step t, and 1e-2 in the paper. As
    weights have an RMS of some 0.02 to 0.1 the default is that times AdamW's usual rate, near 1e-2.
    """

    rate: ClassVar[float] = 8.0
    mup: ClassVar[bool] = False

    beta2_decay: float = Field(-0.8, le=0)
    """Exponent c of the second moment's rate, 1 - t^c."""
    eps: float = Field(1e-3, gt=0)
    """Minimum RMS assumed for a weight."""
    clip: float = Field(1.0, gt=0)
    """Largest RMS of an update before it is scaled."""

    def state_values(self, model: Model) -> dict[str, int]:
        def values(shape: torch.Size) -> int:
            """Returns the number of elements of state for a weight of this shape: row and column sums of a stack of
            matrices; for a vector, its number of elements."""
            n = shape.numel()
            return n // shape[-1] + n // shape[-2] if len(shape) > 1 else n

        return {name: values(weight.shape) for name, weight in model.named_parameters()}

    def step_values(self, model: Model, device: str = "cpu") -> dict[str, int]:
        """Returns {parameter name: fp32 elements} that its step allocates: an update, which is computed while that of
        the group's previous weight is still alive."""
        at_once = {
            id(weight): weight.numel() + (0 if before is None else before.numel())
            for group in parameter_groups(model, 1.0, 1.0, model.config.rates)
            for before, weight in pairwise([None, *group["params"]])
        }
        return {name: at_once[id(weight)] for name, weight in model.named_parameters()}

    def over_groups(self, groups: Groups, model: Model) -> torch.optim.Optimizer:
        return Adafactor(groups, beta2_decay=self.beta2_decay, eps=(None, self.eps), d=self.clip)
