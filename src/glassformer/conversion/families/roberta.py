"""RoBERTa: BERT's layers, one segment, and positions that start after the padding's row."""

from __future__ import annotations

from typing import Any

from glassformer.architectures.bert import POOLER
from glassformer.config import ModelConfig
from glassformer.conversion.families.common import read_model
from glassformer.conversion.families.encoders import (
    encoder_block,
    first_position,
    heads_of,
    named,
    refuse_decoders,
    written_behind_padding,
)
from glassformer.conversion.family import Family
from glassformer.conversion.fields import Fields
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.head import HeadConfig, TransformConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import LearnedConfig

HEAD = {"head": "lm_head", "head.transform.dense": "lm_head.dense", "head.transform.norm": "lm_head.layer_norm"}
UNUSED = r".*embeddings\.position_ids|lm_head\.decoder\..*"


def read(fields: Fields) -> ModelConfig:
    refuse_decoders(fields)
    norm = LayerNormConfig(eps=fields.number("layer_norm_eps", 1e-12))
    masked = HeadConfig(tied=True, bias=True, transform=TransformConfig(norm=norm))
    first = first_position(fields)
    context = fields.whole("max_position_embeddings", 512) - first
    return read_model(
        fields, context, encoder_block(fields, norm),
        embedding=EmbeddingConfig(
            norm=norm, position=LearnedConfig(length=context, offset=first),
            segments=fields.whole("type_vocab_size", 2),
        ),
        final_norm=None,
    ).replace(
        head=heads_of(fields, {"RobertaForMaskedLM": masked, "RobertaModel": POOLER}, "RobertaModel")
    )  # fmt: skip


def write(config: ModelConfig) -> dict[str, Any]:
    return written_behind_padding(config, FAMILY.architecture_of(config))


FAMILY = Family(
    "roberta", "RobertaForMaskedLM", named("roberta", HEAD, UNUSED), read, write, others={"vector": "RobertaModel"}
)
