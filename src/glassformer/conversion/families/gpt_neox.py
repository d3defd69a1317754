"""GPT-NeoX-20B, Pythia and other models of the class `GPTNeoXForCausalLM`."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families.common import name_of, read_ffn, read_model, sizes
from glassformer.conversion.family import Family, Gguf, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Grouped, Names
from glassformer.conversion.rope import read_rotary, write_rotary
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.residual import ParallelConfig, PreConfig

NAMES = Names(
    "gpt_neox.layers.*.",
    {
        "embedding": "gpt_neox.embed_in",
        ".mixer.qkv": Grouped("attention.query_key_value"),
        ".mixer.output": "attention.dense",
        ".ffn.up_proj": "mlp.dense_h_to_4h",
        ".ffn.down_proj": "mlp.dense_4h_to_h",
        ".residual.mixer_norm": "input_layernorm",
        ".residual.ffn_norm": "post_attention_layernorm",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    prefix="gpt_neox.",
    ignored=r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",
)
GGUF = Names(
    "blk.*.",
    {
        "embedding": "token_embd",
        ".mixer.qkv": "attn_qkv",
        ".mixer.output": "attn_output",
        ".ffn.up_proj": "ffn_up",
        ".ffn.down_proj": "ffn_down",
        ".residual.mixer_norm": "attn_norm",
        ".residual.ffn_norm": "ffn_norm",
        "final_norm": "output_norm",
        "head": "output",
    },
)
PART, BASE = "rotary_pct", "rotary_emb_base"


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 2048)
    parallel = fields.flag("use_parallel_residual", True)
    fields.ignore("attention_probs_dropout_prob", "hidden_dropout_prob")
    block = BlockConfig(
        mixer=AttentionConfig(
            n_heads=fields.whole("num_attention_heads"),
            bias=fields.flag("attention_bias", True),
            position=read_rotary(fields, context, fraction=0.25, fraction_name=PART, theta_name=BASE),
        ),
        ffn=MlpConfig(**read_ffn(fields, "gelu")),
        norm=LayerNormConfig(eps=fields.number("layer_norm_eps", 1e-5)),
        residual=ParallelConfig(shared_norm=False) if parallel else PreConfig(),
    )
    return read_model(fields, context, block, HeadConfig(tied=False))


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    mixer = attention(block)
    return {
        **sizes(config),
        **write_rotary(mixer.position, PART, BASE),
        "num_attention_heads": mixer.n_heads,
        "layer_norm_eps": block.norm.eps,
        "hidden_act": name_of(ffn(block)),
        "attention_bias": mixer.bias,
        "use_parallel_residual": isinstance(block.residual, ParallelConfig),
    }


FIELDS = {BASE: "rope.freq_base", "use_parallel_residual": "use_parallel_residual"}

FAMILY = Family("gpt_neox", "GPTNeoXForCausalLM", NAMES, read, write, Gguf("gptneox", GGUF, FIELDS, fraction=PART))
