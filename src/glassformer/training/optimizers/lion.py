from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from glassformer.model import Model
from glassformer.training.optimizers.base import Beta, Eager, Groups, OptimizerConfig


class Lion(Eager):
    """Lion optimizer: w -= lr (sign(b1 m + (1 - b1) g) + decay w);  m = b2 m + (1 - b2) g.

    Chen et al. 2023, 2302.06675, algorithm 2."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            lr, (b1, b2) = group["lr"], group["betas"]
            for w in group["params"]:
                if w.grad is None:
                    continue
                state = self.state[w]
                if not state:
                    state["exp_avg"] = torch.zeros_like(w)
                m = state["exp_avg"]
                w.mul_(1 - lr * group["weight_decay"]).sub_(m.lerp(w.grad, 1 - b1).sign_(), alpha=lr)
                m.lerp_(w.grad, 1 - b2)
        return loss


class LionConfig(OptimizerConfig, kind="lion"):
    """Config of `Lion`. Its updates are 1 in every value, larger than AdamW's: the paper (section 5) takes a learning
    rate 3 to 10 times smaller and a weight decay larger by the same factor. Short runs do best with a third of
    AdamW's learning rate."""

    rate: ClassVar[float] = 1 / 3

    betas: tuple[Beta, Beta] = (0.9, 0.99)

    def state_values(self, model: Model) -> dict[str, int]:
        return {name: weight.numel() for name, weight in model.named_parameters()}

    def step_values(self, model: Model, device: str = "cpu") -> dict[str, int]:
        """Returns {parameter name: fp32 elements} that its step allocates: those of the sign of the momentum."""
        return {name: weight.numel() for name, weight in model.named_parameters()}

    def over_groups(self, groups: Groups, model: Model) -> torch.optim.Optimizer:
        return Lion(groups, betas=self.betas)
