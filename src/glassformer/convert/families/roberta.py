"""RoBERTa: BERT's layers, one segment, and positions that begin behind the row of the padding."""

from __future__ import annotations

from typing import Any

from glassformer.architectures.bert import POOLER
from glassformer.config import ModelConfig
from glassformer.convert.families import bert
from glassformer.convert.families.bert import encoder_block, heads_of, named, refuse_decoders
from glassformer.convert.families.common import read_model
from glassformer.convert.family import Closed, Family
from glassformer.convert.fields import Fields
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
    padding = fields.get("pad_token_id", 1)
    if type(padding) is not int or padding < 0:
        raise fields.refuse("pad_token_id", padding, "a token is right")
    context = fields.whole("max_position_embeddings", 512) - padding - 1
    return read_model(
        fields, context, encoder_block(fields, norm), HeadConfig(),
        embedding=EmbeddingConfig(
            norm=norm, position=LearnedConfig(length=context, offset=padding + 1),
            segments=fields.whole("type_vocab_size", 2),
        ),
        final_norm=None,
    ).vary(head=heads_of(fields, {"RobertaForMaskedLM": masked, "RobertaModel": POOLER}, "RobertaModel"))  # fmt: skip


def write(config: ModelConfig) -> dict[str, Any]:
    position = config.embedding.position
    if not isinstance(position, LearnedConfig) or not position.offset:
        raise Closed({"embedding.position": getattr(position, "offset", None)})
    return {
        **bert.write(config.vary(head=bert.POOLER)),
        "architectures": [FAMILY.architecture_of(config)],
        "max_position_embeddings": config.context + position.offset,
        "pad_token_id": position.offset - 1,
    }


FAMILY = Family(
    "roberta", "RobertaForMaskedLM", named("roberta", HEAD, UNUSED), read, write, others={"vector": "RobertaModel"}
)
