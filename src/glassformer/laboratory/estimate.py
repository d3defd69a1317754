"""Estimate of the duration of a grid's runs on this machine, before the first starts."""

from __future__ import annotations

import time
from collections.abc import Mapping

from glassformer.config import ModelConfig
from glassformer.text import Tokens
from glassformer.training import Recipe
from glassformer.training.pace import paces

PROBE = 20.0
"""Seconds of timed training, over all models and sizes."""
SOURCE = "from timed training steps on this machine"


def rates(configs: Mapping[str, ModelConfig], text: Tokens, recipe: Recipe) -> dict[str, float]:
    """Returns {model: tokens per second of training on this machine}. The smallest models are timed, each for its share
    of `PROBE` seconds; larger models are assumed to reach an equal number of FLOP/s."""
    flops = {name: config.flops(recipe.context) for name, config in configs.items()}
    recipe = recipe.replace(tokens=None, flops=None, minutes=None, steps=10**6, compile=False)
    found: dict[str, float] = {}
    left, last = PROBE, ""
    for i, name in enumerate(sorted(configs, key=flops.__getitem__)):
        if left <= 0 and last:
            found[name] = found[last] * flops[last] / flops[name]
            continue
        began = time.monotonic()
        timed = paces({name: (configs[name], recipe)}, text, seconds=left / (len(configs) - i))[name]
        found[name], last = timed.tokens_per_second, name
        left -= time.monotonic() - began
    return found
