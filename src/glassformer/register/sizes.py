"""Sizes of a model under their names in `transformers`."""

from __future__ import annotations

from typing import Any

from glassformer.config import ModelConfig

HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")


def sizes(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of config.json with sizes that other programs read."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.head.tied,
        **({"is_encoder_decoder": True} if config.encoder is not None else {}),
        **({"num_labels": config.head.classes} if config.head.classes else {}),
    }


def head_sizes(config: ModelConfig) -> dict[str, int | None]:
    """Returns the fields of config.json with the sizes of attention heads, of the first layer that has heads; None for
    each if no layer has."""
    heads = next(filter(None, (block.mixer.heads(config.ctx) for block in config.layers())), (None, None, None))
    return dict(zip(HEADS, heads, strict=True))
