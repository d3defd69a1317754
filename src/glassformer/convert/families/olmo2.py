"""OLMo 2: norms after the branches, and of all queries and keys at once: `Olmo2ForCausalLM`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.convert.families import llama
from glassformer.convert.families.common import ACTIVATIONS, heads, name_of, read_heads, read_whole_rotary, sizes
from glassformer.convert.family import Family, Gguf, attention, ffn
from glassformer.convert.fields import Fields
from glassformer.convert.rope import write_rotary
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, QKNormConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.residual import ResPostConfig

NAMES = replace(
    llama.NAMES,
    modules={
        **llama.NAMES.modules,
        ".mixer.qk_norm.q_norm": "self_attn.q_norm",
        ".mixer.qk_norm.k_norm": "self_attn.k_norm",
        ".residual.mixer_post_norm": "post_attention_layernorm",
        ".residual.ffn_post_norm": "post_feedforward_layernorm",
    },
)
GGUF = replace(
    llama.GGUF,
    modules={
        **llama.GGUF.modules,
        ".mixer.qkv": "attn_q attn_k attn_v",
        ".mixer.qk_norm.q_norm": "attn_q_norm",
        ".mixer.qk_norm.k_norm": "attn_k_norm",
        ".residual.mixer_post_norm": "post_attention_norm",
        ".residual.ffn_post_norm": "post_ffw_norm",
    },
)


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 2048)
    norm = RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-5))
    block = BlockConfig(
        mixer=AttentionConfig(
            **read_heads(fields),
            bias=fields.flag("attention_bias", False),
            position=read_whole_rotary(fields, context),
            qk_norm=QKNormConfig(norm=norm, over="full"),
        ),
        ffn=GluConfig(
            hidden=fields.whole("intermediate_size"),
            activation=fields.one_of("hidden_act", ACTIVATIONS, "silu"),
        ),
        norm=norm,
        residual=ResPostConfig(),
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
    mixer, network = attention(block), ffn(block)
    return {
        **sizes(config),
        **heads(mixer),
        **write_rotary(mixer.position),
        "rms_norm_eps": block.norm.eps,
        "hidden_act": name_of(network),
        "attention_bias": mixer.bias,
    }


FAMILY = Family(
    "olmo2", "Olmo2ForCausalLM", NAMES, read, write, Gguf("olmo2", GGUF, unheeded=frozenset({"attention.key_length"}))
)
