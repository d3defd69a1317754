"""Command R: parallel branches with one norm, rotary positions of neighbouring pairs: `CohereForCausalLM`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.residual import ParallelConfig

NAMES = with_modules(llama.NAMES, QK_NORM)
GGUF = replace(
    llama.GGUF,
    modules={  # always tied: no head
        "embedding": "token_embd",
        ".mixer.qkv": "attn_q attn_k attn_v",
        **QK_NORM_GGUF,
        ".mixer.output": "attn_output",
        ".ffn.gate_proj": "ffn_gate",
        ".ffn.up_proj": "ffn_up",
        ".ffn.down_proj": "ffn_down",
        ".residual.mixer_norm": "attn_norm",
        "final_norm": "output_norm",
    },
)
FLAGS = {"use_qk_norm": "blk.0.attn_q_norm.weight"}


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 8192)
    norm = LayerNormConfig(eps=fields.number("layer_norm_eps", 1e-5), bias=False)
    fields.ignore("model_max_length")
    block = BlockConfig(
        mixer=AttentionConfig(
            **read_heads(fields),
            bias=fields.flag("attention_bias", False),
            position=read_whole_rotary(fields, context, theta=5e5, pairing="interleaved"),
            qk_norm=QKNormConfig(norm=norm, over="each_head") if fields.flag("use_qk_norm", False) else None,
        ),
        ffn=GluConfig(**read_ffn(fields)),
        norm=norm,
        residual=ParallelConfig(),
    )
    head = HeadConfig(tied=True, scale=fields.number("logit_scale", 0.0625))
    return read_model(fields, context, block, head)


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    mixer = attention(block)
    return {
        **usual(config),
        "layer_norm_eps": block.norm.eps,
        "attention_bias": mixer.bias,
        "use_qk_norm": mixer.qk_norm is not None,
        "logit_scale": config.head.scale,
    }


def _implied(said: Mapping[str, Any]) -> dict[str, Any]:
    layers = said.get("block_count")
    large = isinstance(layers, int) and layers >= 64  # llama.cpp looks for these norms only there
    return {} if large else {"use_qk_norm": False}


FAMILY = Family(
    "cohere", "CohereForCausalLM", NAMES, read, write,
    Gguf("command-r", GGUF, {"logit_scale": "logit_scale"}, FLAGS, frozenset({"attention.key_length"}), _implied),
)  # fmt: skip
