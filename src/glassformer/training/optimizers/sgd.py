from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field, model_validator

from glassformer.model import Model
from glassformer.parts.mup import parameter_groups
from glassformer.training.optimizers.base import Eager, Groups, OptimizerConfig


class SGD(Eager, torch.optim.SGD):
    """SGD of torch, never compiled."""


class SGDConfig(OptimizerConfig, kind="sgd"):
    """Stochastic gradient descent with momentum. Sutskever et al. 2013.

    m = momentum m + g + decay w;  w -= lr m, or lr (g + decay w + momentum m) with Nesterov's momentum.

    The update is as large as the gradient, where AdamW's is about 1 in every value: gradients clipped to norm 1 need a
    learning rate about a hundred times AdamW's, and even so a transformer trains slower, as its parts have gradients of
    different size (Zhang et al. 2024, 2402.16788).
    """

    rate: ClassVar[float] = 100.0
    mup: ClassVar[bool] = False

    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = False

    @model_validator(mode="after")
    def _has_momentum(self) -> SGDConfig:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self

    @property
    def decay(self) -> float:
        """Factor on the recipe's weight decay: 1 - momentum, because the decay is part of the gradient, which momentum
        multiplies by 1 / (1 - momentum)."""
        return (1 - self.momentum) / self.rate

    def state_values(self, model: Model) -> dict[str, int]:
        return {name: weight.numel() if self.momentum else 0 for name, weight in model.named_parameters()}

    def step_values(self, model: Model, device: str = "cpu") -> dict[str, int]:
        """Returns {parameter name: fp32 elements} that its step allocates: those of the gradient with decay. Nesterov's
        momentum adds a look-ahead, which a step of all weights at once writes over the gradients (torch.optim.sgd,
        `_multi_tensor_sgd`)."""
        groups = parameter_groups(model, 1.0, 1.0, model.config.rates)
        decays = {id(weight): group["weight_decay"] > 0 for group in groups for weight in group["params"]}
        ahead = self.nesterov and not self.steps_at_once(device)
        return {name: weight.numel() * (decays[id(weight)] + ahead) for name, weight in model.named_parameters()}

    def steps_at_once(self, device: str) -> bool:
        """Returns True on GPUs, where torch by default (`foreach`) updates all weights of a group together."""
        return device == "cuda"

    def over_groups(self, groups: Groups, model: Model) -> torch.optim.Optimizer:
        return SGD(groups, momentum=self.momentum, nesterov=self.nesterov)
