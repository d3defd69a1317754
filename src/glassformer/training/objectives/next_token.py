from __future__ import annotations

from glassformer.config import ModelConfig, told
from glassformer.errors import RequestError
from glassformer.training.objectives.base import ObjectiveConfig


class NextTokenConfig(ObjectiveConfig, kind="next_token"):
    """Each token from those before it: the mean of -log p(x_i | x_<i). Held-out text has bits per byte."""

    def check(self, config: ModelConfig) -> None:
        """A next-token loss means nothing where a token sees what follows it, and a plain text has no source."""
        if config.encoder is not None:
            raise RequestError(
                "objective=next_token gives a model one text, and the encoder of this one reads another beside it",
                code="conflict", field="objective", value=self.kind, expected="a model without an encoder",
            )  # fmt: skip
        super().check(config)
        for layer, block in enumerate(config.layers()):
            if not block.mixer.causal(config.ctx):
                raise RequestError(
                    f"layer {layer} is not causal ({told(block.mixer)}): it would see the token it is to predict; use "
                    "a causal mixer, or objective masked",
                    code="not_causal", field=f"layers.{layer}.mixer", value=block.mixer,
                )  # fmt: skip
            if block.ffn is not None and not block.ffn.causal:
                raise RequestError(
                    f"layer {layer} is not causal (ffn {block.ffn.kind}): which tokens its experts choose depends on "
                    "the tokens that are to be predicted; use experts that tokens choose (ffn kind experts)",
                    code="not_causal", field=f"layers.{layer}.ffn", value=block.ffn.kind,
                )  # fmt: skip
