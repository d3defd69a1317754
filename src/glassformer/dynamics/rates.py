"""Default learning rate of a model, for training and for diagnosis."""

from __future__ import annotations

import math

from glassformer.config import ModelConfig


def default_learning_rate(config: ModelConfig) -> float:
    """Returns 0.003239 - 0.0001395 ln N, with N parameters without embeddings: Kaplan et al. 2020, 2001.08361, eq. D.1;
    at least 1e-4 (the fit is for models below a billion). Under muP, N and the rate are those of the base width."""
    wider = 1.0 if config.mup is None else config.mup.ratio(config.d_model) ** 2
    return max(1e-4, 0.003239 - 0.0001395 * math.log(max(1, config.num_params(embeddings=False) * wider)))
