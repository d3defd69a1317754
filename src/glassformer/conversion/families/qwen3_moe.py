"""Qwen 3 with experts: `Qwen3MoeForCausalLM`. One window for all layers, or none, and experts in every layer."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families import qwen3
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
from glassformer.conversion.family import Family, attention, experts
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import EachExpert, TensorLayout
from glassformer.parts.ffn import ExpertsConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, QKNormConfig
from glassformer.parts.norm import RMSNormConfig

EXPERTS: dict[str, str | TensorLayout] = {
    ".ffn.router": "mlp.gate",
    **{f".ffn.{name}_proj": EachExpert(f"mlp.experts.#.{name}_proj") for name in ("gate", "up", "down")},
}
NAMES = with_experts(qwen3.NAMES, EXPERTS)


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 32768)
    norm = RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-6))
    fields.only("decoder_sparse_step", 1)
    fields.only("mlp_only_layers", [], None)
    fields.ignore("intermediate_size", "max_window_layers")  # of layers without experts; of the family without them
    width = whole_or_none(fields, "sliding_window", 4096)
    block = BlockConfig(
        mixer=AttentionConfig(
            n_heads=fields.whole("num_attention_heads"),
            n_kv_heads=whole_or_none(fields, "num_key_value_heads", 4),
            head_dim=fields.whole("head_dim", None),
            bias=fields.flag("attention_bias", False),
            position=read_whole_rotary(fields, context),
            visibility=within(width if fields.flag("use_sliding_window", False) else None),
            qk_norm=QKNormConfig(norm=norm),
        ),
        ffn=ExpertsConfig(
            **read_routing(fields, "moe_intermediate_size", n_experts=128, top_k=8, also="num_experts", width=(768,)),
            normalised=fields.flag("norm_topk_prob", False),
        ),
        norm=norm,
    )
    return read_model(fields, context, block, HeadConfig(tied=False))


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    mixer, network = attention(block), experts(block)
    return {
        **usual(config),
        "rms_norm_eps": block.norm.eps,
        "attention_bias": mixer.bias,
        "use_sliding_window": window(mixer) is not None,
        "sliding_window": window(mixer),
        "moe_intermediate_size": network.hidden,
        "num_experts": network.n_experts,
        "num_experts_per_tok": network.top_k,
        "norm_topk_prob": network.normalised,
    }


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", NAMES, read, write)
