"""StableLM 3B, 2-1.6B and 2-12B: a quarter of each head rotated, norms per head: `StableLmForCausalLM`."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families import llama
from glassformer.conversion.families.common import QK_NORM_GGUF, divided, read_ffn, read_model, usual, with_modules
from glassformer.conversion.family import Family, Gguf, attention
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import EachHead
from glassformer.conversion.rope import read_rotary
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, QKNormConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.residual import ParallelConfig, PreConfig, ResidualConfig

NAMES = with_modules(
    llama.NAMES,
    {
        ".mixer.qk_norm.q_norm": EachHead("self_attn.q_layernorm.norms.#"),
        ".mixer.qk_norm.k_norm": EachHead("self_attn.k_layernorm.norms.#"),
    },
)
GGUF = with_modules(llama.GGUF, {**QK_NORM_GGUF, ".mixer.qkv": "attn_q attn_k attn_v"})
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
            qk_norm=QKNormConfig(norm=norm.replace(bias=False), over="each_head")
            if fields.flag("qk_layernorm", False)
            else None,
        ),
        ffn=GluConfig(**read_ffn(fields)),
        norm=norm,
        residual=residual,
    )
    return read_model(fields, context, block, HeadConfig(tied=False))


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(divided(config).layers())
    mixer = attention(block)
    return {
        **usual(config, "partial_rotary_factor"),
        "head_dim": config.d_model // mixer.n_heads,
        "layer_norm_eps": block.norm.eps,
        "use_qkv_bias": mixer.bias,
        "qk_layernorm": mixer.qk_norm is not None,
        "use_parallel_residual": isinstance(block.residual, ParallelConfig),
    }


FAMILY = Family(
    "stablelm", "StableLmForCausalLM", NAMES, read, write,
    Gguf("stablelm", GGUF, {"use_parallel_residual": "use_parallel_residual"}, FLAGS),
)  # fmt: skip
