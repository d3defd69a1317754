"""Mistral 7B and other models of the class `MistralForCausalLM`: LLaMA's wiring, with a window or without."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families.common import (
    read_ffn,
    read_model,
    read_whole_rotary,
    usual,
    whole_or_none,
    window,
    within,
)
from glassformer.conversion.families.llama import NAMES
from glassformer.conversion.family import Family, attention
from glassformer.conversion.fields import Fields
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import RMSNormConfig


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 131072)
    block = BlockConfig(
        mixer=AttentionConfig(
            n_heads=fields.whole("num_attention_heads"),
            n_kv_heads=whole_or_none(fields, "num_key_value_heads", 8),
            head_dim=fields.whole("head_dim", None),
            position=read_whole_rotary(fields, context),
            visibility=within(whole_or_none(fields, "sliding_window", 4096)),
        ),
        ffn=GluConfig(**read_ffn(fields)),
        norm=RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-6)),
    )
    return read_model(fields, context, block, HeadConfig(tied=False))


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    mixer = attention(block)
    return {
        **usual(config),
        "rms_norm_eps": block.norm.eps,
        "sliding_window": window(mixer),
    }


# llama.cpp stores it as `llama`.
FAMILY = Family("mistral", "MistralForCausalLM", NAMES, read, write)
