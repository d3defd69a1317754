"""StarCoder 2: `Starcoder2ForCausalLM`."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families import llama
from glassformer.conversion.families.common import (
    read_ffn,
    read_heads,
    read_model,
    read_whole_rotary,
    usual,
    window,
    with_modules,
    within,
)
from glassformer.conversion.family import Family, Gguf, attention
from glassformer.conversion.fields import Fields
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig

NAMES = with_modules(llama.NAMES, {".ffn.up_proj": "mlp.c_fc", ".ffn.down_proj": "mlp.c_proj"})
GGUF = with_modules(llama.GGUF, {".mixer.qkv": "attn_q attn_k attn_v"})
FIELDS = {"norm_epsilon": "attention.layer_norm_epsilon"}
UNHEEDED = frozenset({"attention.key_length", "attention.sliding_window"})


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 4096)
    bias = fields.flag("use_bias", True)
    fields.ignore("activation_function", "layer_norm_epsilon", "mlp_type", "norm_type")  # published, without effect
    block = BlockConfig(
        mixer=AttentionConfig(
            **read_heads(fields, n_kv_heads=2),
            bias=bias,
            position=read_whole_rotary(fields, context),
            visibility=within(fields.whole("sliding_window", None)),
        ),
        ffn=MlpConfig(**read_ffn(fields, "gelu_pytorch_tanh"), bias=bias),
        norm=LayerNormConfig(eps=fields.number("norm_epsilon", 1e-5)),
    )
    return read_model(fields, context, block, HeadConfig(tied=True))


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    mixer = attention(block)
    return {
        **usual(config),
        "sliding_window": window(mixer),
        "norm_epsilon": block.norm.eps,
        "use_bias": mixer.bias,
    }


FAMILY = Family(
    "starcoder2", "Starcoder2ForCausalLM", NAMES, read, write, Gguf("starcoder2", GGUF, FIELDS, unheeded=UNHEEDED)
)
