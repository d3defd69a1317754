"""StarCoder 2: `Starcoder2ForCausalLM`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.convert.families import llama
from glassformer.convert.families.common import (
    ACTIVATIONS,
    heads,
    name_of,
    read_heads,
    read_whole_rotary,
    sizes,
    window,
    within,
)
from glassformer.convert.family import Family, Gguf, attention, ffn
from glassformer.convert.fields import Fields
from glassformer.convert.rope import write_rotary
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig

NAMES = replace(
    llama.NAMES, modules={**llama.NAMES.modules, ".ffn.up_proj": "mlp.c_fc", ".ffn.down_proj": "mlp.c_proj"}
)
GGUF = replace(llama.GGUF, modules={**llama.GGUF.modules, ".mixer.qkv": "attn_q attn_k attn_v"})
FIELDS = {"norm_epsilon": "attention.layer_norm_epsilon"}
UNHEEDED = frozenset({"attention.key_length", "attention.sliding_window"})


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 4096)
    norm = LayerNormConfig(eps=fields.number("norm_epsilon", 1e-5))
    bias = fields.flag("use_bias", True)
    fields.ignore("activation_function", "layer_norm_epsilon", "mlp_type", "norm_type")  # published, read by nobody
    block = BlockConfig(
        mixer=AttentionConfig(
            **read_heads(fields, n_kv_heads=2),
            bias=bias,
            position=read_whole_rotary(fields, context),
            visibility=within(fields.whole("sliding_window", None)),
        ),
        ffn=MlpConfig(
            hidden=fields.whole("intermediate_size"),
            activation=fields.one_of("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
            bias=bias,
        ),
        norm=norm,
    )
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        d_model=fields.whole("hidden_size"),
        context=context,
        stack=stack_of([block] * fields.layers("num_hidden_layers")),
        final_norm=norm,
        head=HeadConfig(tied=fields.flag("tie_word_embeddings", True)),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    mixer, network = attention(block), ffn(block)
    return {
        **sizes(config),
        **heads(mixer),
        **write_rotary(mixer.position),
        "sliding_window": window(mixer),
        "norm_epsilon": block.norm.eps,
        "hidden_act": name_of(network),
        "use_bias": mixer.bias,
    }


FAMILY = Family(
    "starcoder2", "Starcoder2ForCausalLM", NAMES, read, write, Gguf("starcoder2", GGUF, FIELDS, unheeded=UNHEEDED)
)
