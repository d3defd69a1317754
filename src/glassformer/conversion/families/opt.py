"""OPT: `OPTForCausalLM`. Its norms have a fixed eps."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families.common import ACTIVATIONS, name_of, read_model
from glassformer.conversion.family import Family, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import LearnedConfig
from glassformer.parts.residual import PostConfig, PreConfig

NAMES = Names(
    "model.decoder.layers.*.",
    {
        "embedding": "model.decoder.embed_tokens",
        "embedding.position": "model.decoder.embed_positions",
        ".mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        ".mixer.output": "self_attn.out_proj",
        ".ffn.up_proj": "fc1",
        ".ffn.down_proj": "fc2",
        ".residual.mixer_norm": "self_attn_layer_norm",
        ".residual.ffn_norm": "final_layer_norm",
        "final_norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
    },
    prefix="model.",
)
NORM = LayerNormConfig(eps=1e-5)
OFFSET = 2


def read(fields: Fields) -> ModelConfig:
    d, bias = fields.whole("hidden_size"), fields.flag("enable_bias", True)
    before, removed = fields.flag("do_layer_norm_before", True), fields.flag("_remove_final_layer_norm", False)
    fields.only("word_embed_proj_dim", d)
    fields.only("layer_norm_elementwise_affine", True)
    fields.ignore("prefix")  # token that precedes a text
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=fields.whole("num_attention_heads"), bias=bias),
        ffn=MlpConfig(
            hidden=fields.whole("ffn_dim"),
            activation=fields.one_of("activation_function", ACTIVATIONS, "relu"),
            bias=bias,
        ),
        norm=NORM,
        residual=PreConfig() if before else PostConfig(),
    )
    return read_model(
        fields,
        fields.whole("max_position_embeddings", 2048),
        block,
        HeadConfig(tied=True),
        embedding=EmbeddingConfig(position=LearnedConfig(offset=OFFSET)),
        final_norm=NORM if before and not removed else None,
    )


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    mixer, network = attention(block), ffn(block)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "word_embed_proj_dim": config.d_model,
        "ffn_dim": network.hidden,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": mixer.n_heads,
        "max_position_embeddings": config.context,
        "do_layer_norm_before": not isinstance(block.residual, PostConfig),
        "_remove_final_layer_norm": config.final_norm is None,
        "enable_bias": mixer.bias,
        "activation_function": name_of(network),
        "tie_word_embeddings": config.head.tied,
    }


FAMILY = Family("opt", "OPTForCausalLM", NAMES, read, write)
