"""An optimizer that steps by the sign of the gradient: w -= lr (sign(g) + decay w)."""

import torch

from glassformer.training.optimizers import OptimizerConfig


class SignDescent(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is not None:
                    w.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * w.grad.sign())


class SignDescentConfig(OptimizerConfig, kind="sign_descent"):
    rate = 0.3  # default learning rate, as a multiple of AdamW's

    def over_groups(self, groups, model):  # groups: dicts of params, lr and weight_decay
        return SignDescent(groups, {})

    def state_values(self, model):  # elements kept for each parameter, for the planned memory
        return {name: 0 for name, _ in model.named_parameters()}

    def step_values(self, model, device="cpu"):  # further elements that a step computes
        return {name: weight.numel() for name, weight in model.named_parameters()}
