"""Phi-1, 1.5 and 2: parallel branches with one norm, part of each head rotated: `PhiForCausalLM`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families import llama
from glassformer.conversion.families.common import read_ffn, read_heads, read_model, usual
from glassformer.conversion.family import Blocked, Family, Gguf, attention
from glassformer.conversion.fields import Fields
from glassformer.conversion.rope import read_rotary
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, QKNormConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.residual import ParallelConfig

NAMES = replace(
    llama.NAMES,
    modules={
        "embedding": "model.embed_tokens",
        ".mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        ".mixer.qk_norm.q_norm": "self_attn.q_layernorm",
        ".mixer.qk_norm.k_norm": "self_attn.k_layernorm",
        ".mixer.output": "self_attn.dense",
        ".ffn.up_proj": "mlp.fc1",
        ".ffn.down_proj": "mlp.fc2",
        ".residual.mixer_norm": "input_layernorm",
        "final_norm": "model.final_layernorm",
        "head": "lm_head",
    },
)
GGUF = replace(
    llama.GGUF,
    modules={
        "embedding": "token_embd",
        ".mixer.qkv": "attn_q attn_k attn_v",
        ".mixer.output": "attn_output",
        ".ffn.up_proj": "ffn_up",
        ".ffn.down_proj": "ffn_down",
        ".residual.mixer_norm": "attn_norm",
        "final_norm": "output_norm",
        "head": "output",
    },
)


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 2048)
    norm = LayerNormConfig(eps=fields.number("layer_norm_eps", 1e-5))
    block = BlockConfig(
        mixer=AttentionConfig(
            **read_heads(fields),
            bias=True,
            position=read_rotary(fields, context, fraction=0.5),
            qk_norm=QKNormConfig(norm=norm) if fields.flag("qk_layernorm", False) else None,
        ),
        ffn=MlpConfig(**read_ffn(fields, "gelu_new")),
        norm=norm,
        residual=ParallelConfig(),
    )
    return read_model(fields, context, block, HeadConfig(tied=False, bias=True))


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    mixer = attention(block)
    if mixer.qk_norm and mixer.head_dim != config.d_model // mixer.n_heads:  # width of the class's norms
        raise Blocked({"mixer.head_dim": mixer.head_dim})
    return {
        **usual(config, "partial_rotary_factor"),
        "layer_norm_eps": block.norm.eps,
        "qk_layernorm": mixer.qk_norm is not None,
    }


FAMILY = Family(
    "phi", "PhiForCausalLM", NAMES, read, write, Gguf("phi2", GGUF, unheeded=frozenset({"attention.key_length"}))
)
