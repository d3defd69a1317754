"""What most families say in the same words."""

from __future__ import annotations

from typing import Any

from glassformer.config import ModelConfig
from glassformer.convert.family import ffn
from glassformer.convert.fields import Fields
from glassformer.parts.ffn import FFNConfig
from glassformer.parts.mixer import AttentionConfig

# Their names of our activations. The first of ours is the one written.
ACTIVATIONS: dict[str, Any] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
}
_THEIRS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}


def name_of(network: FFNConfig) -> str:
    """The published name of a network's activation."""
    ours = getattr(network, "activation", network.kind)
    return _THEIRS.get(ours, ours)


def read_heads(fields: Fields) -> dict[str, Any]:
    """n_heads, n_kv_heads and head_dim of an attention."""
    return {
        "n_heads": fields.whole("num_attention_heads"),
        "n_kv_heads": fields.whole("num_key_value_heads", None),
        "head_dim": fields.whole("head_dim", None),
    }


def heads(mixer: AttentionConfig) -> dict[str, Any]:
    """Of an attention whose defaults are written out."""
    return {
        "num_attention_heads": mixer.n_heads,
        "num_key_value_heads": mixer.n_kv_heads,
        "head_dim": mixer.head_dim,
    }


def sizes(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": ffn(next(config.layers())).hidden,
        "num_hidden_layers": config.n_layers,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.head.tied,
    }
