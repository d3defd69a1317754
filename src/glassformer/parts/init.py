"""How weights begin: declared beside the part as a role, filled by a rule.

A `Linear` says what it is for (`role`); the model's init config turns roles into distributions, given the width
and the depth. Nothing is matched by parameter name. Vectors (norm weights, biases) begin at one and zero.

role        what it is                                     GPT-2           small-init / Wang
hidden      reads the residual stream or a branch          N(0, 0.02)      N(0, 2/(5d))
output      writes a branch's result to the stream         0.02/sqrt(2L)   std 2/(L sqrt(d))
embedding   rows looked up by token or position            N(0, 0.02)      N(0, 2/(5d))
head        the stream to logits                           N(0, 0.02)      N(0, 2/(5d))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from glassformer.parts.base import BuildContext, PartConfig

Role = Literal["hidden", "output", "embedding", "head"]


@dataclass
class Init:
    """Fills one weight: normal with the standard deviation of its role, or Xavier's bound where there is none."""

    std: dict[str, float] | None = None
    gain: float = 1.0
    uniform: bool = False
    generator: torch.Generator | None = None

    def fill(self, weight: Tensor, role: Role) -> None:
        """weight (o, i), in place."""
        if weight.is_meta:
            return
        if self.std is not None:
            weight.normal_(0.0, self.std[role], generator=self.generator)
            return
        fan_out, fan_in = weight.shape
        std = self.gain * math.sqrt(2.0 / (fan_in + fan_out))
        if self.uniform:
            weight.uniform_(-math.sqrt(3.0) * std, math.sqrt(3.0) * std, generator=self.generator)
        else:
            weight.normal_(0.0, std, generator=self.generator)


class InitConfig(PartConfig, axis="init"):
    """A rule from roles to distributions."""

    def rule(self, ctx: BuildContext, generator: torch.Generator | None = None) -> Init:
        raise NotImplementedError


class Gpt2InitConfig(InitConfig, kind="gpt2"):
    """N(0, std^2); branches that write to the stream are divided by sqrt(2 L), one for each of the 2 L additions,
    so that the stream's variance does not grow with depth. Radford et al. 2019, section 2.3."""

    std: float = Field(0.02, gt=0)
    depth_scaled: bool = True

    def rule(self, ctx: BuildContext, generator: torch.Generator | None = None) -> Init:
        output = self.std / math.sqrt(2 * ctx.n_layers) if self.depth_scaled else self.std
        return Init(
            {"hidden": self.std, "output": output, "embedding": self.std, "head": self.std}, generator=generator
        )


class XavierInitConfig(InitConfig, kind="xavier"):
    """std = gain sqrt(2 / (fan_in + fan_out)) on every matrix, the tables included. Glorot & Bengio 2010.

    `uniform` draws from U(-a, a), a = gain sqrt(6 / (fan_in + fan_out)), which has the same variance.
    """

    gain: float = Field(1.0, gt=0)
    uniform: bool = True

    def rule(self, ctx: BuildContext, generator: torch.Generator | None = None) -> Init:
        return Init(None, self.gain, self.uniform, generator)


class SmallInitConfig(InitConfig, kind="small"):
    """std = sqrt(2 / (5 d)) (Nguyen & Salazar 2019, arXiv 1910.05895); outputs 2 / (L sqrt(d)) (Wang & Komatsuzaki,
    as in GPT-NeoX-20B, arXiv 2204.06745)."""

    def rule(self, ctx: BuildContext, generator: torch.Generator | None = None) -> Init:
        small = math.sqrt(2.0 / (5.0 * ctx.d_model))
        output = 2.0 / (ctx.n_layers * math.sqrt(ctx.d_model))
        return Init({"hidden": small, "output": output, "embedding": small, "head": small}, generator=generator)
