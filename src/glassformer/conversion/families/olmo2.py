"""OLMo 2: norms after the branches, and over all heads of queries and keys: `Olmo2ForCausalLM`."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families import llama
from glassformer.conversion.families.common import (
    QK_NORM,
    QK_NORM_GGUF,
    read_ffn,
    read_heads,
    read_model,
    read_whole_rotary,
    usual,
    with_modules,
)
from glassformer.conversion.family import Family, Gguf, attention
from glassformer.conversion.fields import Fields
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, QKNormConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.residual import ResPostConfig

NAMES = with_modules(
    llama.NAMES,
    {
        **QK_NORM,
        ".residual.mixer_post_norm": "post_attention_layernorm",
        ".residual.ffn_post_norm": "post_feedforward_layernorm",
    },
)
GGUF = with_modules(
    llama.GGUF,
    {
        **QK_NORM_GGUF,
        ".mixer.qkv": "attn_q attn_k attn_v",
        ".residual.mixer_post_norm": "post_attention_norm",
        ".residual.ffn_post_norm": "post_ffw_norm",
    },
)


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 2048)
    norm = RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-5))
    block = BlockConfig(
        mixer=AttentionConfig(
            **read_heads(fields),
            bias=fields.flag("attention_bias", False),
            position=read_whole_rotary(fields, context),
            qk_norm=QKNormConfig(norm=norm, over="full"),
        ),
        ffn=GluConfig(**read_ffn(fields)),
        norm=norm,
        residual=ResPostConfig(),
    )
    return read_model(fields, context, block, HeadConfig(tied=False))


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    mixer = attention(block)
    return {
        **usual(config),
        "rms_norm_eps": block.norm.eps,
        "attention_bias": mixer.bias,
    }


FAMILY = Family(
    "olmo2", "Olmo2ForCausalLM", NAMES, read, write, Gguf("olmo2", GGUF, unheeded=frozenset({"attention.key_length"}))
)
