"""How long the runs of a grid will take on this machine, before the first of them starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.planning.here import here, known_profile
from glassformer.text import Tokens
from glassformer.training import NextTokenConfig, Recipe, train

PROBE = 20.0
"""Seconds of training, over all models and sizes, where this machine's rates are not known."""
MEASURED = 12 * Recipe.model_fields["evaluation_tokens"].default
"""Tokens that a run is scored on: eight times while it trains, and four times as many at its end."""
FORWARD = 1 / 3
"""Of a training step."""
STARTED = 2.0
"""Seconds of a run that do not depend on its size, in a process that is there: weights, files."""


@dataclass(frozen=True)
class Rates:
    """Tokens a second of training, by model and size."""

    by_name: Mapping[str, float]
    source: str
    """Where they are from, in words."""

    def seconds(self, name: str, tokens: float) -> float:
        """Of a whole run."""
        return STARTED + (tokens + FORWARD * MEASURED) / self.by_name[name]


def rates(configs: Mapping[str, ModelConfig], text: Tokens, recipe: Recipe) -> Rates:
    """Of these models on this machine: from what `plan --here` has measured of its processor, where it has; else each
    is trained for its share of `PROBE` seconds. Once these are over, larger models are taken to compute as fast."""
    device = machine.settings(recipe.device, recipe.dtype, recipe.threads, False).device
    by = known_profile(recipe.threads) if device == "cpu" and recipe.objective == NextTokenConfig() else None
    if by is not None:
        planned = {name: here(config, recipe.batch_size, recipe.context, by) for name, config in configs.items()}
        found = {name: one.tokens / one.step_seconds for name, one in planned.items()}
        return Rates(found, "from what plan --here measured of this processor")
    return Rates(_probed(configs, text, recipe), f"by {PROBE:.0f} s of training on this machine")


def _probed(configs: Mapping[str, ModelConfig], text: Tokens, recipe: Recipe) -> dict[str, float]:
    flops = {name: config.flops(recipe.context) for name, config in configs.items()}
    found: dict[str, float] = {}
    left, last = PROBE, ""
    for i, name in enumerate(sorted(configs, key=flops.__getitem__)):
        if left <= 0 and last:
            found[name] = found[last] * flops[last] / flops[name]
            continue
        share = left / (len(configs) - i)
        short: dict[str, Any] = {"tokens": None, "flops": None, "steps": None, "minutes": max(share, 1e-3) / 60}
        run = train(configs[name], text, recipe.vary(**short, evaluation_tokens=recipe.context, compile=False))
        found[name], last = run.tokens_per_second, name
        left -= max(run.seconds, share)
    return found
