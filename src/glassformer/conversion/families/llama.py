"""LLaMA 1, 2 and 3, SmolLM, Vicuna, TinyLlama and other models of the class `LlamaForCausalLM`."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families.common import divided, read_ffn, read_heads, read_model, read_whole_rotary, usual
from glassformer.conversion.family import Family, Gguf, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names, Paired
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import RMSNormConfig

NAMES = Names(
    "model.layers.*.",
    {
        "embedding": "model.embed_tokens",
        ".mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        ".mixer.output": "self_attn.o_proj",
        ".ffn.gate_proj": "mlp.gate_proj",
        ".ffn.up_proj": "mlp.up_proj",
        ".ffn.down_proj": "mlp.down_proj",
        ".residual.mixer_norm": "input_layernorm",
        ".residual.ffn_norm": "post_attention_layernorm",
        "final_norm": "model.norm",
        "head": "lm_head",
    },
    prefix="model.",
    ignored=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
GGUF = Names(
    "blk.*.",
    {
        "embedding": "token_embd",
        ".mixer.qkv": Paired("attn_q", "attn_k", "attn_v"),
        ".mixer.output": "attn_output",
        ".ffn.gate_proj": "ffn_gate",
        ".ffn.up_proj": "ffn_up",
        ".ffn.down_proj": "ffn_down",
        ".residual.mixer_norm": "attn_norm",
        ".residual.ffn_norm": "ffn_norm",
        "final_norm": "output_norm",
        "head": "output",
    },
    ignored=r"rope_(freqs|factors_(long|short))\.weight",
)


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 2048)
    block = BlockConfig(
        mixer=AttentionConfig(
            **read_heads(fields),
            bias=fields.flag("attention_bias", False),
            position=read_whole_rotary(fields, context),
        ),
        ffn=GluConfig(**read_ffn(fields), bias=fields.flag("mlp_bias", False)),
        norm=RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-6)),
    )
    return read_model(fields, context, block, HeadConfig(tied=False))


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(divided(config).layers())
    mixer, network = attention(block), ffn(block)
    return {
        **usual(config),
        "rms_norm_eps": block.norm.eps,
        "attention_bias": mixer.bias,
        "mlp_bias": getattr(network, "bias", False),
    }


FAMILY = Family("llama", "LlamaForCausalLM", NAMES, read, write, Gguf("llama", GGUF, factors=True))
