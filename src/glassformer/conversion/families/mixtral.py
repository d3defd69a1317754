"""Mixtral: `MixtralForCausalLM`. Mistral's wiring with experts, whose weights are a softmax over the chosen."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families.common import (
    read_model,
    read_routing,
    read_whole_rotary,
    usual,
    whole_or_none,
    window,
    with_experts,
    within,
)
from glassformer.conversion.families.llama import NAMES as LLAMA
from glassformer.conversion.family import Family, attention, experts
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import EachExpert
from glassformer.parts.ffn import ExpertsConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import RMSNormConfig

NAMES = with_experts(
    LLAMA,
    {
        ".ffn.router": "block_sparse_moe.gate",
        ".ffn.gate_proj": EachExpert("block_sparse_moe.experts.#.w1"),
        ".ffn.up_proj": EachExpert("block_sparse_moe.experts.#.w3"),
        ".ffn.down_proj": EachExpert("block_sparse_moe.experts.#.w2"),
    },
)


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 131072)
    block = BlockConfig(
        mixer=AttentionConfig(
            n_heads=fields.whole("num_attention_heads"),
            n_kv_heads=whole_or_none(fields, "num_key_value_heads", 8),
            head_dim=fields.whole("head_dim", None),
            position=read_whole_rotary(fields, context, theta=1e6),
            visibility=within(fields.whole("sliding_window", None)),
        ),
        ffn=ExpertsConfig(**read_routing(fields, "intermediate_size", n_experts=8, top_k=2)),
        norm=RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-5)),
    )
    return read_model(fields, context, block, HeadConfig(tied=False))


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    network = experts(block)
    return {
        **usual(config),
        "rms_norm_eps": block.norm.eps,
        "sliding_window": window(attention(block)),
        "num_local_experts": network.n_experts,
        "num_experts_per_tok": network.top_k,
    }


FAMILY = Family("mixtral", "MixtralForCausalLM", NAMES, read, write)
