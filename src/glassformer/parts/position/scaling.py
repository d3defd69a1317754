"""Scaling of rotary frequencies beyond the context they were trained for."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext, PartConfig, refuse_truth
from glassformer.parts.core.words import Word, number

MAX_FACTOR = 1 << 28
"""Largest growth factor of a context, which also bounds the turns of a pair within it."""

Turns = Annotated[float, Field(ge=1e-3, le=MAX_FACTOR)]
Divisor = Annotated[float, BeforeValidator(refuse_truth), Field(ge=1e-3, le=1e38)]
"""Divisor of the frequency of one pair of elements; 1e30 is llama.cpp's value for a pair that does not rotate."""


def _growth(word: str, text: str) -> Mapping[str, float]:
    """Parses the text of a short name such as `+yarn:4`, the growth factor of the context, to the fields of a scaling.
    Raises RequestError below 1."""
    factor = number(word, text)
    if not 1 <= factor <= MAX_FACTOR:
        raise RequestError(
            f"{word}:{text}: the context grows by a factor of 1 or more, at most {MAX_FACTOR:,}",
            code="range", field=word, value=text, expected=">= 1",
        )  # fmt: skip
    return {"factor": factor}


class RotaryScaling:
    """Rotary frequencies theta_i = base^(-2i/r), unscaled; subclasses stretch them. `exponent` (r/2,) holds 2i/r.

    `magnitude` multiplies cos and sin. `t` is the number of tokens of the sequence so far.
    """

    magnitude: float = 1.0
    key: Hashable = ()
    settled: int | None = None
    """Largest length of a text within which the frequencies do not change; None if they do not change at any length."""

    def frequencies(self, exponent: Tensor, base: float, dim: int, t: int) -> Tensor:
        return base**-exponent

    def check(self, dim: int) -> None:
        """Raises RequestError if `dim` rotated elements are too few for the formula of the scaling; accepts any number
        by default."""

    def __str__(self) -> str:
        return ""


class RotaryScalingConfig(PartConfig, axis="rotary_scaling"):
    factor: float = Field(ge=1e-3, le=MAX_FACTOR)
    """Growth factor of the context beyond the one of training."""
    original_context: int | None = Field(None, gt=0, le=1 << 28)
    """Number of tokens of the context in which the frequencies were trained; None for the model's context."""

    @property
    def longest(self) -> int | None:
        """Number of tokens of the original context times the factor; None if the original context is not set."""
        return int(self.original_context * self.factor) if self.original_context else None

    def resolved(self, ctx: BuildContext) -> Any:
        return self.replace(original_context=self.original_context or ctx.context)

    def build(self, ctx: BuildContext) -> RotaryScaling:
        raise NotImplementedError


class _Bound(RotaryScaling):
    """Base of scalings that depend on the numbers of a config and on the original context."""

    def __init__(self, config: RotaryScalingConfig, context: int):
        self.config = config
        self.context = config.original_context or context
        numbers = [getattr(config, name) for name in type(config).model_fields]
        self.key = (config.kind, self.context, *numbers)

    def __str__(self) -> str:
        return f", {self.config.kind} x {self.config.factor:g} from {self.context}"


class LinearScaling(_Bound):
    def frequencies(self, exponent: Tensor, base: float, dim: int, t: int) -> Tensor:
        return base**-exponent / self.config.factor


class LinearScalingConfig(RotaryScalingConfig, kind="linear", words=Word("interpolate", _growth, "4")):
    """Config of position interpolation: theta_i / factor. Chen et al. 2023, 2306.15595."""

    def build(self, ctx: BuildContext) -> LinearScaling:
        return LinearScaling(self, ctx.context)


class Ntk(_Bound):
    def check(self, dim: int) -> None:
        if dim <= 2:
            raise RequestError(
                f"scaling={self.config.kind} needs more than 2 turned values a head, and there are {dim}",
                code="conflict", field="position.scaling", value=self.config.kind,
            )  # fmt: skip

    def frequencies(self, exponent: Tensor, base: float, dim: int, t: int) -> Tensor:
        return (base * self.config.factor ** (dim / (dim - 2))) ** -exponent


class NtkScalingConfig(RotaryScalingConfig, kind="ntk", words=Word("ntk", _growth, "4")):
    """Config of NTK-aware scaling: base' = base factor^(r/(r-2)), which interpolates slow pairs and leaves fast ones
    (bloc97 2023; section 3.1 of 2309.00071)."""

    def build(self, ctx: BuildContext) -> Ntk:
        return Ntk(self, ctx.context)


class DynamicNtk(Ntk):
    def __init__(self, config: RotaryScalingConfig, context: int):
        super().__init__(config, context)
        self.settled = self.context

    def frequencies(self, exponent: Tensor, base: float, dim: int, t: int) -> Tensor:
        growth = self.config.factor * max(t, self.context) / self.context - (self.config.factor - 1)
        return (base * growth ** (dim / (dim - 2))) ** -exponent


class DynamicNtkScalingConfig(RotaryScalingConfig, kind="dynamic_ntk", words=Word("dynamic_ntk", _growth, "4")):
    """Config of NTK-aware scaling with the factor for the present length t: base' = base (f t/c - (f-1))^(r/(r-2)) for
    t > c.

    Within the trained context c it is plain rotary. Beyond it the frequencies change as text grows, so keys cached
    earlier were rotated by earlier frequencies: cached and uncached logits then differ, as in every implementation that
    caches rotated keys.
    """

    def build(self, ctx: BuildContext) -> DynamicNtk:
        return DynamicNtk(self, ctx.context)


class Yarn(_Bound):
    config: YarnScalingConfig

    def __init__(self, config: YarnScalingConfig, context: int):
        super().__init__(config, context)
        given = config.attention_factor
        self.magnitude = (
            given if given is not None else (0.1 * math.log(config.factor) + 1 if config.factor > 1 else 1.0)
        )

    def frequencies(self, exponent: Tensor, base: float, dim: int, t: int) -> Tensor:
        plain = base**-exponent

        def pair_turning(turns: float) -> float:  # index of the pair with this number of turns in the context
            return dim * math.log(self.context / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair_turning(self.config.beta_fast), pair_turning(self.config.beta_slow)
        if self.config.whole_pairs:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        pair = torch.arange(len(exponent), device=exponent.device, dtype=torch.float32)
        slow = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
        return plain / self.config.factor * slow + plain * (1 - slow)


class YarnScalingConfig(RotaryScalingConfig, kind="yarn", words=Word("yarn", _growth, "4")):
    """Config of YaRN scaling: pairs with more than beta_fast turns within the context stay, those below beta_slow are
    interpolated, with a ramp in between; logits are sharpened by (0.1 ln factor + 1)^2. Peng et al. 2023, 2309.00071,
    section 3."""

    beta_fast: Turns = 32.0
    beta_slow: Turns = 1.0
    attention_factor: float | None = Field(None, ge=1e-3, le=1e3)
    """Factor on cos and sin; None for 0.1 ln(factor) + 1."""
    whole_pairs: bool = True
    """True to round the ends of the ramp to whole pairs."""

    @model_validator(mode="after")
    def _ramps(self) -> YarnScalingConfig:
        if self.beta_fast < self.beta_slow:
            raise RequestError(
                f"beta_fast={self.beta_fast:g} must be at least beta_slow={self.beta_slow:g}",
                code="conflict", field="beta_fast", value=self.beta_fast,
            )  # fmt: skip
        return self

    def build(self, ctx: BuildContext) -> Yarn:
        return Yarn(self, ctx.context)


class LongRope(_Bound):
    config: LongRopeScalingConfig

    def __init__(self, config: LongRopeScalingConfig, context: int):
        super().__init__(config, context)
        self.settled = self.context
        if config.attention_factor is not None:
            self.magnitude = config.attention_factor
        elif config.factor > 1:
            if self.context == 1:
                raise RequestError(
                    "scaling=longrope divides by the logarithm of its original_context, and that is 1; use 2 or more, "
                    "or give an attention_factor",
                    code="range", field="position.scaling.original_context", value=1,
                )  # fmt: skip
            self.magnitude = math.sqrt(1 + math.log(config.factor) / math.log(self.context))

    def check(self, dim: int) -> None:
        for name in ("short", "long"):
            if (given := len(getattr(self.config, name))) != dim // 2:
                raise RequestError(
                    f"scaling=longrope has {given} {name} factors for {dim // 2} turned pairs",
                    code="range", field=f"position.scaling.{name}", value=given,
                )  # fmt: skip

    def frequencies(self, exponent: Tensor, base: float, dim: int, t: int) -> Tensor:
        factors = self.config.long if t > self.context else self.config.short
        return base**-exponent / torch.tensor(factors, device=exponent.device)


class LongRopeScalingConfig(RotaryScalingConfig, kind="longrope"):
    """Config of LongRoPE scaling, theta_i / lambda_i with a searched factor for each pair: `short` up to the trained
    context c, `long` beyond it; cos and sin grow by sqrt(1 + ln(factor) / ln(c)). Ding et al. 2024, 2402.13753; Phi-3.

    As with dynamic NTK, keys cached before c was passed keep their old frequencies.
    """

    short: tuple[Divisor, ...] = Field(max_length=1 << 12)
    long: tuple[Divisor, ...] = Field(max_length=1 << 12)
    attention_factor: float | None = Field(None, ge=1e-3, le=1e3)

    def resolved(self, ctx: BuildContext) -> LongRopeScalingConfig:
        """Returns this config with its magnitude filled in, the only effect of the factor."""
        magnitude = LongRope(self, ctx.context).magnitude
        return self.replace(
            original_context=self.original_context or ctx.context, factor=1.0, attention_factor=magnitude
        )

    def build(self, ctx: BuildContext) -> LongRope:
        return LongRope(self, ctx.context)


class Llama3(_Bound):
    config: Llama3ScalingConfig

    def frequencies(self, exponent: Tensor, base: float, dim: int, t: int) -> Tensor:
        plain = base**-exponent
        turns = self.context * plain / (2 * math.pi)
        low, high = self.config.low_freq_factor, self.config.high_freq_factor
        fast = ((turns - low) / (high - low)).clamp(0, 1)
        return plain / self.config.factor * (1 - fast) + plain * fast


class Llama3ScalingConfig(RotaryScalingConfig, kind="llama3"):
    """Config of Llama 3.1's scaling, like YaRN's with a ramp over the number of turns: theta/factor below
    low_freq_factor, theta above high_freq_factor (2407.21783)."""

    low_freq_factor: Turns = 1.0
    high_freq_factor: Turns = 4.0

    @model_validator(mode="after")
    def _ramps(self) -> Llama3ScalingConfig:
        low, high = self.low_freq_factor, self.high_freq_factor
        if low > high:
            raise RequestError(
                f"low_freq_factor={low:g} must be at most high_freq_factor={high:g}",
                code="conflict", field="low_freq_factor", value=low,
            )  # fmt: skip
        return self

    def build(self, ctx: BuildContext) -> Llama3:
        return Llama3(self, ctx.context)
