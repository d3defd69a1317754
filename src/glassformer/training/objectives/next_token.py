from __future__ import annotations

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.training.objectives.base import ObjectiveConfig, check_causal


class NextTokenConfig(ObjectiveConfig, kind="next_token"):
    """Language-model objective, to predict each token from the tokens before it: the mean of -log p(x_i | x_<i).
    Held-out text has bits per byte."""

    def check(self, config: ModelConfig) -> None:
        """Raises RequestError for a model whose tokens attend to future tokens, or that reads a source."""
        if config.encoder is not None:
            raise RequestError(
                "objective=next_token gives a model one text, and the encoder of this one reads another; give pairs, "
                "with objective=seq2seq",
                code="conflict", field="objective", value=self.kind, expected="a model without an encoder",
            )  # fmt: skip
        super().check(config)
        check_causal(config)
