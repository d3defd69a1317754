"""Gemma 1: `GemmaForCausalLM`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families import llama
from glassformer.conversion.families.common import (
    ACTIVATIONS,
    name_of,
    read_heads,
    read_model,
    read_whole_rotary,
    usual,
)
from glassformer.conversion.family import Family, Gguf, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Shifted
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import RMSNormConfig

GGUF = replace(
    llama.GGUF,
    modules={  # always tied: no head
        "embedding": "token_embd",
        ".mixer.qkv": "attn_q attn_k attn_v",
        ".mixer.output": "attn_output",
        ".ffn.gate_proj": "ffn_gate",
        ".ffn.up_proj": "ffn_up",
        ".ffn.down_proj": "ffn_down",
        ".residual.mixer_norm": Shifted("attn_norm"),
        ".residual.ffn_norm": Shifted("ffn_norm"),
        "final_norm": Shifted("output_norm"),
    },
)
SAID = {**ACTIVATIONS, "gelu": "gelu_tanh"}
"""Published name of an activation -> ours; the first configs write gelu for its tanh approximation."""


def read(fields: Fields) -> ModelConfig:
    context, d = fields.whole("max_position_embeddings", 8192), fields.whole("hidden_size")
    fields.only("use_bidirectional_attention", False)
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    block = BlockConfig(
        mixer=AttentionConfig(
            **read_heads(fields, n_kv_heads=16, head_dim=256),
            bias=fields.flag("attention_bias", False),
            position=read_whole_rotary(fields, context),
        ),
        ffn=GluConfig(
            hidden=fields.whole("intermediate_size"), activation=fields.one_of("hidden_act", SAID, "gelu_pytorch_tanh")
        ),
        norm=RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-6), unit_offset=True),
    )
    return read_model(fields, context, block, HeadConfig(tied=True), embedding=EmbeddingConfig(scale=d**0.5))


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    mixer, activation = attention(block), name_of(ffn(block))
    return {
        **usual(config),
        "rms_norm_eps": block.norm.eps,
        "hidden_act": "gelu_python" if activation == "gelu" else activation,
        "attention_bias": mixer.bias,
    }


FAMILY = Family("gemma", "GemmaForCausalLM", llama.NAMES, read, write, Gguf("gemma", GGUF))
