"""BERT: `BertForMaskedLM`, `BertModel` with its pooler, `BertForSequenceClassification`."""

from __future__ import annotations

from typing import Any

from glassformer.architectures.bert import POOLER
from glassformer.config import ModelConfig
from glassformer.conversion.families.common import read_model
from glassformer.conversion.families.encoders import (
    encoder_block,
    heads_of,
    labels,
    named,
    refuse_decoders,
    transform,
    written,
)
from glassformer.conversion.family import Family
from glassformer.conversion.fields import Fields
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import LearnedConfig

HEAD = {
    "head": "cls.predictions",
    "head.transform.dense": "cls.predictions.transform.dense",
    "head.transform.norm": "cls.predictions.transform.LayerNorm",
}
UNUSED = r".*embeddings\.position_ids|cls\.predictions\.decoder\..*|cls\.seq_relationship\..*"


def read(fields: Fields) -> ModelConfig:
    refuse_decoders(fields)
    norm = LayerNormConfig(eps=fields.number("layer_norm_eps", 1e-12))
    masked = HeadConfig(tied=True, bias=True, transform=transform(fields, norm))
    classes = HeadConfig(pool="cls", transform=POOLER.transform, **labels(fields), bias=True)
    known = {
        "BertForMaskedLM": masked, "BertForPreTraining": masked, "BertModel": POOLER,
        "BertForSequenceClassification": classes,
    }  # fmt: skip
    context = fields.whole("max_position_embeddings", 512)
    segments = fields.whole("type_vocab_size", 2)
    return read_model(
        fields, context, encoder_block(fields, norm),
        embedding=EmbeddingConfig(norm=norm, position=LearnedConfig(length=context), segments=segments),
        final_norm=None,
    ).replace(head=heads_of(fields, known, "BertModel"))  # fmt: skip


def write(config: ModelConfig) -> dict[str, Any]:
    return written(config, FAMILY.architecture_of(config))


FAMILY = Family(
    "bert", "BertForMaskedLM", named("bert", HEAD, UNUSED), read, write,
    others={"vector": "BertModel", "classes": "BertForSequenceClassification"},
)  # fmt: skip
