"""OLMoE: `OlmoeForCausalLM`. Queries and keys normalised over all heads, experts in every layer."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families import qwen3_moe
from glassformer.conversion.families.common import (
    QK_NORM,
    divided,
    read_heads,
    read_model,
    read_routing,
    read_whole_rotary,
    usual,
    with_experts,
)
from glassformer.conversion.families.llama import NAMES as LLAMA
from glassformer.conversion.family import Blocked, Family, attention, experts
from glassformer.conversion.fields import Fields
from glassformer.parts.ffn import ExpertsConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, QKNormConfig
from glassformer.parts.norm import RMSNormConfig

NAMES = with_experts(LLAMA, qwen3_moe.EXPERTS | QK_NORM)


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 4096)
    norm = RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-5))
    fields.only("clip_qkv", None)  # clips queries and keys after their norms, unlike `mixer.clip`
    block = BlockConfig(
        mixer=AttentionConfig(
            **read_heads(fields),
            bias=fields.flag("attention_bias", False),
            position=read_whole_rotary(fields, context),
            qk_norm=QKNormConfig(norm=norm, over="full"),
        ),
        ffn=ExpertsConfig(
            **read_routing(fields, "intermediate_size", n_experts=64, top_k=8, also="num_experts"),
            normalised=fields.flag("norm_topk_prob", False),
        ),
        norm=norm,
    )
    return read_model(fields, context, block, HeadConfig(tied=False))


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(divided(config).layers())
    mixer, network = attention(block), experts(block)
    if mixer.n_heads * (mixer.head_dim or 0) != config.d_model:  # its norms are as wide as the model
        raise Blocked({"mixer.head_dim": mixer.head_dim})
    return {
        **usual(config),
        "rms_norm_eps": block.norm.eps,
        "attention_bias": mixer.bias,
        "num_experts": network.n_experts,
        "num_experts_per_tok": network.top_k,
        "norm_topk_prob": network.normalised,
    }


FAMILY = Family("olmoe", "OlmoeForCausalLM", NAMES, read, write)
