"""Granite 3: Llama with a factor on the embedding, the branches, the scores and the logits: `GraniteForCausalLM`."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families import llama
from glassformer.conversion.families.common import read_ffn, read_heads, read_model, read_whole_rotary, usual
from glassformer.conversion.family import Family, Gguf, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.residual import PreConfig

FIELDS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
FLAGS = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 2048)
    block = BlockConfig(
        mixer=AttentionConfig(
            **read_heads(fields),
            bias=fields.flag("attention_bias", False),
            position=read_whole_rotary(fields, context),
            scale=fields.number("attention_multiplier", 1.0),
        ),
        ffn=GluConfig(**read_ffn(fields), bias=fields.flag("mlp_bias", False)),
        norm=RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-6)),
        residual=PreConfig(scale=fields.number("residual_multiplier", 1.0)),
    )
    if (divisor := fields.number("logits_scaling", 1.0)) <= 0:
        raise fields.refuse("logits_scaling", divisor, "expected a positive number")
    embedding = EmbeddingConfig(scale=fields.number("embedding_multiplier", 1.0))
    return read_model(fields, context, block, HeadConfig(tied=False, scale=1 / divisor), embedding=embedding)


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    mixer, network = attention(block), ffn(block)
    return {
        **usual(config),
        "rms_norm_eps": block.norm.eps,
        "attention_bias": mixer.bias,
        "mlp_bias": getattr(network, "bias", False),
        "embedding_multiplier": config.embedding.scale,
        "residual_multiplier": block.residual.scale,
        "attention_multiplier": mixer.scale,
        "logits_scaling": _divisor(config.head.scale or 1.0),
    }


def _divisor(scale: float) -> float:
    """Returns the divisor whose inverse is `scale`: the shortest decimal that has this inverse exactly, otherwise 1 /
    scale."""
    rounded = (round(1 / scale, digits) for digits in range(17))
    return next((number for number in rounded if number and 1 / number == scale), 1 / scale)


FAMILY = Family(
    "granite", "GraniteForCausalLM", llama.NAMES, read, write, Gguf("granite", llama.GGUF, FIELDS, FLAGS, factors=True)
)
