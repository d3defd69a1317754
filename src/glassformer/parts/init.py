"""How weights begin: declared beside the part as a role, filled by a rule.

A part says what each of its matrices is for (its role); the model's init config turns roles into distributions, given
the width and the depth. Nothing is matched by parameter name. Vectors (norm weights, biases) begin at one and zero.

L is half the number of residual additions (`BuildContext.n_branches`): the number of layers, where each has a mixer and
an ffn. A layer may be written as several blocks.

role        what it is                                     GPT-2           small-init / Wang
score       W_Q and W_K, whose product makes scores        N(0, 0.02)      N(0, 2/(5d))
hidden      reads the residual stream or a branch          N(0, 0.02)      N(0, 2/(5d))
output      writes a branch's result to the stream         0.02/sqrt(2L)   std 2/(L sqrt(d))
embedding   rows looked up by token or position            N(0, 0.02)      N(0, 2/(5d))
head        the stream to logits                           N(0, 0.02)      N(0, 2/(5d))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from glassformer.parts.base import BuildContext, PartConfig

WEIGHTS_RULE = 2
"""The rule by which weights are drawn from a seed; runs of one seed begin alike only where this is the same.

1: one generator, over the modules in their order. 2: a stream for each parameter, from (seed, parameter name)."""

Role = Literal["score", "hidden", "output", "embedding", "head"]

Spread = Callable[[Role, float, float], float]
"""(role, fan_in, fan_out) -> standard deviation."""


def xavier(gain: float = 1.0, others: float = 1.0) -> Spread:
    """sqrt(2 / (fan_in + fan_out)) times `gain` where values pass from token to token or through the ffn (hidden,
    output), times `others` elsewhere."""
    gains = {"hidden": gain, "output": gain}
    return lambda role, fan_in, fan_out: gains.get(role, others) * math.sqrt(2.0 / (fan_in + fan_out))


def by_role(rest: float, output: float) -> Spread:
    """The same for every shape: `output` for what writes to the stream, `rest` for all else."""
    return lambda role, fan_in, fan_out: output if role == "output" else rest


@dataclass
class Init:
    """Fills one weight with the standard deviation of its role and shape, from a normal or a uniform distribution."""

    std: Spread = field(default_factory=xavier)
    uniform: bool = False
    generator: torch.Generator | None = None

    def fill(self, weight: Tensor, role: Role) -> None:
        """weight (o, i), in place."""
        if weight.is_meta:
            return
        fan_out, fan_in = map(float, weight.shape)
        std = self.std(role, fan_in, fan_out)
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
        output = self.std / math.sqrt(ctx.n_branches) if self.depth_scaled else self.std
        return Init(by_role(self.std, output), generator=generator)


class XavierInitConfig(InitConfig, kind="xavier"):
    """std = gain sqrt(2 / (fan_in + fan_out)) on every matrix, the tables included. Glorot & Bengio 2010.

    `uniform` draws from U(-a, a), a = gain sqrt(6 / (fan_in + fan_out)), which has the same variance.
    """

    gain: float = Field(1.0, gt=0)
    uniform: bool = True

    def rule(self, ctx: BuildContext, generator: torch.Generator | None = None) -> Init:
        return Init(xavier(self.gain, self.gain), self.uniform, generator)


class DeepNormInitConfig(InitConfig, kind="deepnorm"):
    """Xavier, normal, with W_V, W_O and the ffn shrunk by beta = (8 L)^(-1/4). Wang et al. 2022, 2203.00555."""

    beta: float | None = Field(None, gt=0)
    """None: (8 L)^(-1/4) of L layers."""

    def rule(self, ctx: BuildContext, generator: torch.Generator | None = None) -> Init:
        return Init(xavier(self.beta or (4 * ctx.n_branches) ** -0.25), generator=generator)


class SmallInitConfig(InitConfig, kind="small"):
    """std = sqrt(2 / (5 d)) (Nguyen & Salazar 2019, arXiv 1910.05895); outputs 2 / (L sqrt(d)) (Wang & Komatsuzaki,
    as in GPT-NeoX-20B, arXiv 2204.06745)."""

    def rule(self, ctx: BuildContext, generator: torch.Generator | None = None) -> Init:
        small = math.sqrt(2.0 / (5.0 * ctx.d_model))
        output = 4.0 / (ctx.n_branches * math.sqrt(ctx.d_model))
        return Init(by_role(small, output), generator=generator)
