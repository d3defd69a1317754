"""Mistral 7B and what else was built as `MistralForCausalLM`: LLaMA's wiring, with a window or without."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.convert.families.common import (
    ACTIVATIONS,
    heads,
    name_of,
    read_whole_rotary,
    sizes,
    whole_or_none,
    window,
    within,
)
from glassformer.convert.families.llama import NAMES
from glassformer.convert.family import Family, attention, ffn
from glassformer.convert.fields import Fields
from glassformer.convert.rope import write_rotary
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import RMSNormConfig


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 131072)
    norm = RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-6))
    block = BlockConfig(
        mixer=AttentionConfig(
            n_heads=fields.whole("num_attention_heads"),
            n_kv_heads=whole_or_none(fields, "num_key_value_heads", 8),
            head_dim=fields.whole("head_dim", None),
            position=read_whole_rotary(fields, context),
            visibility=within(whole_or_none(fields, "sliding_window", 4096)),
        ),
        ffn=GluConfig(
            hidden=fields.whole("intermediate_size"), activation=fields.one_of("hidden_act", ACTIVATIONS, "silu")
        ),
        norm=norm,
    )
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        d_model=fields.whole("hidden_size"),
        context=context,
        stack=stack_of([block] * fields.layers("num_hidden_layers")),
        final_norm=norm,
        head=HeadConfig(tied=fields.flag("tie_word_embeddings", False)),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    mixer = attention(block)
    return {
        **sizes(config),
        **heads(mixer),
        **write_rotary(mixer.position),
        "rms_norm_eps": block.norm.eps,
        "hidden_act": name_of(ffn(block)),
        "sliding_window": window(mixer),
    }


# llama.cpp stores it as `llama`.
FAMILY = Family("mistral", "MistralForCausalLM", NAMES, read, write)
