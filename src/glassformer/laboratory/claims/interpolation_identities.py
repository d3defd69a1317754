"""Three ways to stretch rotary positions, by their formulas."""

import math

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset
from glassformer.parts.core.base import BuildContext
from glassformer.parts.position import Rotary
from glassformer.parts.position.scaling import (
    LinearScalingConfig,
    NtkScalingConfig,
    RotaryScalingConfig,
    YarnScalingConfig,
)

WIDTH, FACTOR, TOLERANCE = 64, 8.0, 1e-6
CONTEXT = 2048


def frequencies(ctx: BuildContext, config: RotaryScalingConfig | None) -> tuple[torch.Tensor, float]:
    scaling = config.build(ctx) if config else None
    rotary = Rotary(WIDTH, scaling=scaling)
    return rotary.frequencies(CONTEXT).double(), rotary.scaling.magnitude


def measure(bench: Bench) -> Outcome:
    ctx = preset(f"llama@10m+context={CONTEXT}").ctx
    plain, _ = frequencies(ctx, None)
    linear, _ = frequencies(ctx, LinearScalingConfig(factor=FACTOR))
    ntk, _ = frequencies(ctx, NtkScalingConfig(factor=FACTOR))
    same, _ = frequencies(ctx, YarnScalingConfig(factor=1.0))
    _, magnitude = frequencies(ctx, YarnScalingConfig(factor=FACTOR))
    wanted = 0.1 * math.log(FACTOR) + 1
    near = {"least": 1 - TOLERANCE, "most": 1 + TOLERANCE, "published": 1.0}
    figures = (
        exact("interpolation: all frequencies over 1/8 of what they were", float((linear / plain).mean() * FACTOR),
              **near),
        exact("NTK-aware: the slowest frequency over 1/8 of what it was", float(ntk[-1] / plain[-1]) * FACTOR, **near),
        exact("NTK-aware: the fastest frequency over what it was", float(ntk[0] / plain[0]), **near),
        exact("YaRN of factor 1: largest change of a frequency", float((same / plain - 1).abs().max()),
              most=0.0, published=0),
        exact("YaRN of factor 8: cos and sin are multiplied by", magnitude, least=wanted - TOLERANCE,
              most=wanted + TOLERANCE, published=wanted),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"heads of {WIDTH}, {FACTOR:g} times {CONTEXT:,} tokens",
                   sure=f"to {TOLERANCE:g}, fp32")  # fmt: skip


CLAIM = Claim(
    name="interpolation-identities",
    statement="Interpolation divides every rotary frequency by s, NTK-aware scaling the slowest alone, and YaRN "
    "sharpens logits by (0.1 ln s + 1)^2.",
    source="2306.15595; 2309.00071",
    published="1/s; 1/s and 1; 1.2079 for s = 8",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
