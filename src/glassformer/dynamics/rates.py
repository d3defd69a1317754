"""The usual learning rate of a model, by which training chooses one and diagnosis judges one."""

from __future__ import annotations

import math

from glassformer.config import ModelConfig


def default_learning_rate(config: ModelConfig) -> float:
    """0.003239 - 0.0001395 ln N, N the parameters without embeddings: Kaplan et al. 2020, 2001.08361, eq. D.1; not
    below 1e-4 (the fit is for models below a billion). Under muP the rate is that of the base width, and N is taken
    there."""
    wider = 1.0 if config.mup is None else config.mup.ratio(config.d_model) ** 2
    return max(1e-4, 0.003239 - 0.0001395 * math.log(max(1, config.num_params(embeddings=False) * wider)))
