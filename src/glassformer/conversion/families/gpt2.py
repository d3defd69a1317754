"""GPT-2, DistilGPT2, and models trained by nanoGPT: `GPT2LMHeadModel`."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.conversion.families import gpt_neox
from glassformer.conversion.families.common import ACTIVATIONS, name_of, with_modules
from glassformer.conversion.family import Family, Gguf, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names, Transposed
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import LearnedConfig

NAMES = Names(
    "transformer.h.*.",
    {
        "embedding": "transformer.wte",
        "embedding.position": "transformer.wpe",
        ".mixer.qkv": Transposed("attn.c_attn"),
        ".mixer.output": Transposed("attn.c_proj"),
        ".ffn.up_proj": Transposed("mlp.c_fc"),
        ".ffn.down_proj": Transposed("mlp.c_proj"),
        ".residual.mixer_norm": "ln_1",
        ".residual.ffn_norm": "ln_2",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    prefix="transformer.",
    ignored=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
)
GGUF = with_modules(gpt_neox.GGUF, {"embedding.position": "position_embd"})


def read(fields: Fields) -> ModelConfig:
    d, n = fields.whole("n_embd", 768), fields.whole("n_head", 12)
    norm = LayerNormConfig(eps=fields.number("layer_norm_epsilon", 1e-5))
    scaled, by_depth = fields.flag("scale_attn_weights", True), fields.flag("scale_attn_by_inverse_layer_idx", False)
    fields.only("add_cross_attention", False)
    fields.ignore("reorder_and_upcast_attn")  # affects precision only
    fields.ignore(*(name for name in fields.values if name.startswith("summary_")))  # of another head

    def block(layer: int) -> BlockConfig:
        scale = ((d // n) ** -0.5 if scaled else 1.0) / (layer + 1 if by_depth else 1)
        return BlockConfig(
            mixer=AttentionConfig(n_heads=n, bias=True, scale=scale),
            ffn=MlpConfig(
                hidden=fields.whole("n_inner", None) or 4 * d,
                activation=fields.one_of("activation_function", ACTIVATIONS, "gelu_new"),
            ),
            norm=norm,
        )

    return ModelConfig(
        vocab_size=fields.whole("vocab_size", 50257),
        d_model=d,
        context=fields.whole("n_positions", fields.whole("n_ctx", 1024)),
        embedding=EmbeddingConfig(position=LearnedConfig()),
        stack=stack_of([block(layer) for layer in range(fields.layers("n_layer"))]),
        final_norm=norm,
        head=HeadConfig(tied=fields.flag("tie_word_embeddings", True)),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    network, scales = ffn(block), [attention(block).scale for block in config.layers()]
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.d_model,
        "n_layer": config.n_layers,
        "n_head": attention(block).n_heads,
        "n_inner": network.hidden,
        "n_positions": config.context,
        "activation_function": name_of(network).replace("gelu_pytorch_tanh", "gelu_new"),
        "layer_norm_epsilon": block.norm.eps,
        "scale_attn_weights": scales[0] != 1.0,
        "scale_attn_by_inverse_layer_idx": len(set(scales)) > 1,
        "tie_word_embeddings": config.head.tied,
    }


FIELDS = {"n_embd": "embedding_length", "n_layer": "block_count", "n_head": "attention.head_count",
          "n_inner": "feed_forward_length", "n_positions": "context_length",
          "layer_norm_epsilon": "attention.layer_norm_epsilon"}  # fmt: skip

FAMILY = Family("gpt2", "GPT2LMHeadModel", NAMES, read, write, Gguf("gpt2", GGUF, FIELDS))
