"""StableLM 3B, 2-1.6B and 2-12B: a quarter of each head turned, norms per head: `StableLmForCausalLM`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.convert.families import llama
from glassformer.convert.families.common import ACTIVATIONS, divided, heads, name_of, sizes
from glassformer.convert.family import Family, Gguf, attention, ffn
from glassformer.convert.fields import Fields
from glassformer.convert.names import EachHead
from glassformer.convert.rope import read_rotary, write_rotary
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, QKNormConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.residual import ParallelConfig, PreConfig, ResidualConfig

NAMES = replace(
    llama.NAMES,
    modules={
        **llama.NAMES.modules,
        ".mixer.qk_norm.q_norm": EachHead("self_attn.q_layernorm.norms.#"),
        ".mixer.qk_norm.k_norm": EachHead("self_attn.k_layernorm.norms.#"),
    },
)
GGUF = replace(
    llama.GGUF,
    modules={
        **llama.GGUF.modules,
        ".mixer.qkv": "attn_q attn_k attn_v",
        ".mixer.qk_norm.q_norm": "attn_q_norm",
        ".mixer.qk_norm.k_norm": "attn_k_norm",
    },
)
FLAGS = {
    "use_qkv_bias": "blk.0.attn_q.bias",
    "qk_layernorm": "blk.0.attn_q_norm.weight",
    "use_parallel_residual": "!blk.0.ffn_norm.weight",
}


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 4096)
    norm = LayerNormConfig(eps=fields.number("layer_norm_eps", 1e-5))
    d, n_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    fields.only("head_dim", None, d // n_heads)
    parallel = fields.flag("use_parallel_residual", False)
    residual: ResidualConfig = ParallelConfig() if parallel else PreConfig()
    block = BlockConfig(
        mixer=AttentionConfig(
            n_heads=n_heads,
            n_kv_heads=fields.whole("num_key_value_heads", 32),
            bias=fields.flag("use_qkv_bias", False),
            out_bias=False,
            position=read_rotary(fields, context, fraction=0.25),
            qk_norm=QKNormConfig(norm=norm.vary(bias=False), over="each_head")
            if fields.flag("qk_layernorm", False)
            else None,
        ),
        ffn=GluConfig(
            hidden=fields.whole("intermediate_size"),
            activation=fields.one_of("hidden_act", ACTIVATIONS, "silu"),
        ),
        norm=norm,
        residual=residual,
    )
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        d_model=d,
        context=context,
        stack=stack_of([block] * fields.layers("num_hidden_layers")),
        final_norm=norm,
        head=HeadConfig(tied=fields.flag("tie_word_embeddings", False)),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(divided(config).layers())
    mixer, network = attention(block), ffn(block)
    return {
        **sizes(config),
        **heads(mixer),
        **write_rotary(mixer.position, "partial_rotary_factor"),
        "layer_norm_eps": block.norm.eps,
        "hidden_act": name_of(network),
        "use_qkv_bias": mixer.bias,
        "qk_layernorm": mixer.qk_norm is not None,
        "use_parallel_residual": block.residual.kind == ParallelConfig.kind,
    }


FAMILY = Family(
    "stablelm", "StableLmForCausalLM", NAMES, read, write,
    Gguf("stablelm", GGUF, {"use_parallel_residual": "use_parallel_residual"}, FLAGS),
)  # fmt: skip
