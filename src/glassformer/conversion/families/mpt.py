"""MPT-7B and MPT-30B: `MptForCausalLM`. The class computes ALiBi without biases, regardless of the fields."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.conversion.families.gpt_neox import GGUF
from glassformer.conversion.family import Family, Gguf, attention
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import AlibiConfig

NAMES = Names(
    "transformer.blocks.*.",
    {
        "embedding": "transformer.wte",
        ".mixer.qkv": "attn.Wqkv",
        ".mixer.output": "attn.out_proj",
        ".ffn.up_proj": "ffn.up_proj",
        ".ffn.down_proj": "ffn.down_proj",
        ".residual.mixer_norm": "norm_1",
        ".residual.ffn_norm": "norm_2",
        "final_norm": "transformer.norm_f",
        "head": "lm_head",
    },
    prefix="transformer.",
)
# Fields of initialisation, of the algorithm, and of the gradient's share that reaches the embedding.
HARMLESS = ("init_config", "init_device", "embedding_fraction", "learned_pos_emb", "tokenizer_name", "verbose",
            "param_init_fn", "fc_type")  # fmt: skip


def read(fields: Fields) -> ModelConfig:
    n, said = fields.whole("n_heads"), fields.mapping("attn_config")
    norm = LayerNormConfig(eps=fields.number("layer_norm_epsilon", 1e-5), bias=False)
    fields.only("no_bias", True)
    fields.only("expansion_ratio", 4)
    fields.only("logit_scale", None)
    fields.only("norm_type", "low_precision_layernorm", "layernorm")
    fields.ignore(*HARMLESS)
    said.only("attn_type", "multihead_attention")
    said.only("alibi", True)
    said.only("alibi_bias_max", 8)  # the class uses 8 for MPT-7B-StoryWriter's 16 too
    said.only("qk_ln", False)
    said.only("prefix_lm", False)
    said.only("is_encoder_decoder", False)  # transformers 5 writes it here too
    said.ignore("attn_impl", "attn_uses_sequence_id")
    block = BlockConfig(
        mixer=AttentionConfig(
            n_heads=n,
            position=AlibiConfig(),
            scale=said.number("softmax_scale", None),
            clip=said.number("clip_qkv", None) or None,
        ),
        ffn=MlpConfig(activation="gelu", bias=False),
        norm=norm,
    )
    if unread := said.unread():
        raise said.refuse(unread[0], said.values.get(unread[0]), "this field is not known")
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        d_model=fields.whole("d_model"),
        context=fields.whole("max_seq_len", 2048),
        stack=stack_of([block] * fields.layers("n_layers")),
        final_norm=norm,
        head=HeadConfig(tied=fields.flag("tie_word_embeddings", True)),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    mixer = attention(block)
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "n_layers": config.n_layers,
        "n_heads": mixer.n_heads,
        "max_seq_len": config.context,
        "expansion_ratio": 4,
        "no_bias": True,
        "layer_norm_epsilon": block.norm.eps,
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "clip_qkv": mixer.clip,
            "softmax_scale": None if mixer.scale == (mixer.head_dim or 1) ** -0.5 else mixer.scale,
        },
        "tie_word_embeddings": config.head.tied,
    }


FIELDS = {"d_model": "embedding_length", "n_layers": "block_count", "n_heads": "attention.head_count",
          "max_seq_len": "context_length", "attn_config.clip_qkv": "attention.clamp_kqv",
          "attn_config.alibi_bias_max": "attention.max_alibi_bias"}  # fmt: skip

FAMILY = Family("mpt", "MptForCausalLM", NAMES, read, write, Gguf("mpt", GGUF, FIELDS))
