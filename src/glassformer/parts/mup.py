"""Maximal update parametrisation (muP): widths that share their best learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field
from torch import nn

from glassformer.parts.core.base import BuildContext, Value
from glassformer.parts.core.init import Init, InitConfig, Role

GROWING: tuple[Role, ...] = ("score", "hidden", "output")
"""Roles of matrices with both sides growing with the width."""


class Mup(Value):
    """Scaling that makes learning rates tuned at `base_width` hold at every width. Yang et al. 2022, 2203.03466, table
    8, for Adam.

    With r = base_width / d_model, relative to the model at the base width, which does not change:

        matrices of the layers   variance times r, learning rate times r (and weight decay over r: their product stays)
        scores                   q k sqrt(base_head_dim) / head_dim, not q k / sqrt(head_dim)
        logits                   times r; the head's weights, tied or not, as at the base width
        tables and vectors       as at the base width
    """

    base_width: int = Field(128, gt=0, le=1 << 20)
    base_head_dim: int | None = Field(None, gt=0, le=1 << 20)
    """Head dim of the model at the base width; None for a quarter of the base width."""

    def ratio(self, d_model: int) -> float:
        return self.base_width / d_model

    def score_scale(self, head_dim: int) -> float:
        return math.sqrt(self.base_head_dim or self.base_width / 4) / head_dim

    def rates(self, d_model: int) -> dict[Role, float]:
        """Returns {role: learning rate} relative to the recipe's, for the roles whose rate changes with the width."""
        return dict.fromkeys(GROWING, self.ratio(d_model))

    def rule(self, init: InitConfig, ctx: BuildContext) -> Init:
        """Returns an initialiser scaled to the width of this model, from the one that `init` gives at the base
        width."""
        base, r = init.build(replace(ctx, d_model=self.base_width)), self.ratio(ctx.d_model)

        def std(role: Role, fan_in: float, fan_out: float) -> float:
            if role in GROWING:
                return base.std(role, fan_in * r, fan_out * r) * math.sqrt(r)
            return base.std(role, fan_in * r, fan_out)  # (v, d)

        return Init(std, base.uniform)


def parameter_groups(
    model: nn.Module, learning_rate: float, weight_decay: float, rates: Mapping[Role, float]
) -> list[dict[str, Any]]:
    """Returns the parameters of a model in groups for an optimizer, as its modules declare them: first those with
    weight decay.

    A weight whose role has a rate other than 1 learns at that multiple of `learning_rate`, kept as the group's `scale`,
    and decays by `weight_decay` divided by it."""
    declared = {}
    for module in model.modules():
        roles = getattr(module, "roles", ())
        if roles and hasattr(module, "weight"):  # a tied table belongs to another module
            declared[id(module.weight)] = (getattr(module, "decays", False), rates.get(roles[0], 1.0))
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(declared.get(id(parameter), (False, 1.0)), []).append(parameter)
    return [
        {
            "params": some,
            "lr": learning_rate * rate,
            "weight_decay": weight_decay / rate if decays else 0.0,
            "scale": rate,
        }
        for (decays, rate), some in sorted(groups.items(), key=lambda pair: not pair[0][0])
    ]
