from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap

import torch
from pydantic import Field
from torch import Tensor, nn

from glassformer.model import Model
from glassformer.training.optimizers.base import Beta, Eager, Groups, OptimizerConfig


class AdamW(Eager, torch.optim.AdamW):
    """AdamW of torch, never compiled. Parameters in fp32 on a CPU are given to torch's operation at once: what `step`
    of torch does before it takes as long as the update of a small model."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        used = [[one for one in group["params"] if one.grad is not None] for group in self.param_groups]
        if closure is not None or not all(self._plain(one) for some in used for one in some):
            return unwrap(torch.optim.AdamW.step)(self, closure)
        for group, params in zip(self.param_groups, used, strict=True):
            if params:
                states = [self.state[one] for one in params]
                grads, steps = [one.grad for one in params], [state["step"] for state in states]
                torch._foreach_add_(steps, 1)
                first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
                (beta1, beta2), decay = group["betas"], group["weight_decay"]
                torch._fused_adamw_(
                    params, grads, first, second, [], steps, lr=group["lr"], beta1=beta1, beta2=beta2,
                    weight_decay=decay, eps=group["eps"], amsgrad=False, maximize=False,
                )  # fmt: skip
        return None

    def _plain(self, parameter: Tensor) -> bool:
        """Returns True if a step of this parameter needs nothing but the operation: its state exists, and parameter and
        gradient are plain tensors in fp32 on a CPU."""
        both = parameter, parameter.grad
        plain = tuple(map(type, both)) == (nn.Parameter, Tensor) and bool(self.state.get(parameter))
        return plain and parameter.is_cpu and all(one is not None and one.dtype == torch.float32 for one in both)


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
