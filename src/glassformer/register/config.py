"""What config.json of our own family says, as `transformers` reads it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transformers.configuration_utils import PreTrainedConfig


class GlassformerConfig(PreTrainedConfig):
    """`glassformer` is the tree of `ModelConfig.to_dict()`; the sizes that other programs look for follow from it.

    These are vocab_size, hidden_size, num_hidden_layers, max_position_embeddings, tie_word_embeddings and, of the first
    layer that has heads, num_attention_heads, num_key_value_heads and head_dim. Raises RequestError for a tree that
    builds nothing.
    """

    model_type = "glassformer"
    has_no_defaults_at_init = True

    def __init__(self, glassformer: dict[str, Any] | None = None, **kwargs: Any):
        models = import_module(
            "glassformer.convert.transformers"
        )  # by name: it enters the class of models, and uses us
        super().__init__(**{**kwargs, **models.sizes(glassformer)})
        self.glassformer = glassformer
