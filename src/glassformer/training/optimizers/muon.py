from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import nn

from glassformer.model import Model
from glassformer.parts.mup import GROWING
from glassformer.training.optimizers.base import Beta, Groups, OptimizerConfig


class MuonConfig(OptimizerConfig, kind="muon"):
    """Orthogonalised momentum for the matrices of the layers, AdamW for embeddings, head and vectors. Jordan et al.
    2024, https://kellerjordan.github.io/posts/muon.

    m = momentum m + g;  w -= lr (0.2 sqrt(max(n, m)) O + decay w), O = U V^T of momentum m + g = U S V^T, found by
    `steps` Newton-Schulz iterations in bf16.

    The factor 0.2 sqrt(max(n, m)) gives updates the RMS of AdamW's, so that its learning rate and weight decay hold,
    and muP's rates with them (Liu et al. 2025, 2502.16982, section 2.2). A fused projection is one matrix. AdamW
    updates the parameters of convolutions, and all others that are not the matrix of a linear layer.
    """

    by_value: ClassVar[bool] = False

    momentum: float = Field(0.95, ge=0, lt=1)
    nesterov: bool = True
    steps: int = Field(5, ge=1, lt=100)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Betas of AdamW."""
    eps: float = Field(1e-8, gt=0)
    """Epsilon of AdamW."""

    def state_values(self, model: Model) -> dict[str, int]:
        matrices = {id(weight) for weight in layer_matrices(model)}
        return {
            name: weight.numel() * (1 if id(weight) in matrices else 2) for name, weight in model.named_parameters()
        }

    def step_values(self, model: Model, device: str = "cpu") -> dict[str, int]:
        """Returns, for a matrix (n, m) with m <= n, the elements of: Nesterov momentum, two X in bf16, two (m, m)."""
        matrices = {id(weight) for weight in layer_matrices(model)}
        return {
            name: 2 * weight.numel() + min(weight.shape) ** 2
            for name, weight in model.named_parameters()
            if id(weight) in matrices
        }

    def over_groups(self, groups: Groups, model: Model) -> torch.optim.Optimizer:
        matrices = {id(weight) for weight in layer_matrices(model)}
        own, others = (
            [
                {**group, "params": some}
                for group in groups
                if (some := [p for p in group["params"] if (id(p) in matrices) is wanted])
            ]
            for wanted in (True, False)
        )
        muon = torch.optim.Muon(
            own, momentum=self.momentum, nesterov=self.nesterov, ns_steps=self.steps, adjust_lr_fn="match_rms_adamw"
        )
        return Joined(muon, torch.optim.AdamW(others, betas=self.betas, eps=self.eps, fused=True))


def layer_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Returns the weights of the linear layers inside the blocks, by the roles that their modules declare."""
    linear = [module for module in model.modules() if set(getattr(module, "roles", ())) & set(GROWING)]
    return [module.weight for module in linear if isinstance(module.weight, nn.Parameter) and module.weight.ndim == 2]


class Joined(torch.optim.Optimizer):
    """Several optimizers over separate parameters as one; all share its parameter groups and state."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self.optimizers = optimizers
        for one in optimizers:
            one.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()
