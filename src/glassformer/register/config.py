"""Class of `transformers` for a config.json in this package's format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig


class GlassformerConfig(PreTrainedConfig):
    """A config.json with the field `glassformer`, the tree of `ModelConfig.to_dict()`, and sizes for other programs,
    which follow from it: vocab_size, hidden_size, num_hidden_layers, max_position_embeddings, tie_word_embeddings and,
    of the first layer that has heads, num_attention_heads, num_key_value_heads and head_dim.

    Raises RequestError for a tree that describes no model.
    """

    model_type = "glassformer"
    has_no_defaults_at_init = True
    load_models: ClassVar[Callable[[], object]] = lambda: None
    """Function that registers the class of models with `transformers`; set by `register.hook`, called when a config is
    read."""

    def __init__(self, glassformer: dict[str, Any] | None = None, **kwargs: Any):
        from glassformer.config import ModelConfig
        from glassformer.register.sizes import head_sizes, sizes

        type(self).load_models()
        if glassformer is not None:
            config = ModelConfig.from_dict(glassformer)
            kwargs |= sizes(config) | head_sizes(config)
        super().__init__(**kwargs)
        self.glassformer = glassformer
