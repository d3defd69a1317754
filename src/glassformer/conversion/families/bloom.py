"""BLOOM and BLOOMZ: `BloomForCausalLM`."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.conversion.families import gpt_neox
from glassformer.conversion.families.common import with_modules
from glassformer.conversion.family import Family, Gguf, attention
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Grouped, Names
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import AlibiConfig

NAMES = Names(
    "transformer.h.*.",
    {
        "embedding": "transformer.word_embeddings",
        "embedding.norm": "transformer.word_embeddings_layernorm",
        ".mixer.qkv": Grouped("self_attention.query_key_value"),
        ".mixer.output": "self_attention.dense",
        ".ffn.up_proj": "mlp.dense_h_to_4h",
        ".ffn.down_proj": "mlp.dense_4h_to_h",
        ".residual.mixer_norm": "input_layernorm",
        ".residual.ffn_norm": "post_attention_layernorm",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    prefix="transformer.",
)
GGUF = with_modules(gpt_neox.GGUF, {"embedding.norm": "token_embd_norm"})
# Megatron's choice of fused operations.
FUSED = ("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "skip_bias_add",
         "skip_bias_add_qkv", "slow_but_exact")  # fmt: skip


def read(fields: Fields) -> ModelConfig:
    width, head_count = fields.whole("hidden_size", None), fields.whole("num_attention_heads", 8)
    d = fields.whole("n_embed", width) or fields.whole("hidden_size")  # the older name takes precedence
    norm = LayerNormConfig(eps=fields.number("layer_norm_epsilon", 1e-5))
    fields.only("apply_residual_connection_post_layernorm", False)
    fields.only("n_inner", None, 4 * d)
    if fields.get("pretraining_tp", 1) != 1:
        fields.only("slow_but_exact", False)  # True would leave out the biases
    fields.ignore(*FUSED)
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=fields.whole("n_head", head_count), bias=True, position=AlibiConfig()),
        ffn=MlpConfig(hidden=4 * d, activation="gelu_tanh"),
        norm=norm,
    )
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        d_model=d,
        context=fields.whole("seq_length", 2048),
        embedding=EmbeddingConfig(norm=norm),
        stack=stack_of([block] * fields.layers("n_layer")),
        final_norm=norm,
        head=HeadConfig(tied=fields.flag("tie_word_embeddings", True)),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "n_inner": 4 * config.d_model,  # fixed by the class
        "n_layer": config.n_layers,
        "n_head": attention(block).n_heads,
        "seq_length": config.context,
        "layer_norm_epsilon": block.norm.eps,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": config.head.tied,
    }


FIELDS = {"n_inner": "feed_forward_length", "n_layer": "block_count", "n_head": "attention.head_count",
          "seq_length": "context_length"}  # fmt: skip

FAMILY = Family("bloom", "BloomForCausalLM", NAMES, read, write, Gguf("bloom", GGUF, FIELDS))
