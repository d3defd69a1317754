"""The sizes of a model under the names that `transformers` gives them."""

from __future__ import annotations

from typing import Any

from glassformer.config import ModelConfig

HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")


def sizes(config: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json that other programs look for."""
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
    """The same of the first layer that has heads; None where no layer has any."""
    heads = next(filter(None, (block.mixer.heads(config.ctx) for block in config.layers())), (None, None, None))
    return dict(zip(HEADS, heads, strict=True))
