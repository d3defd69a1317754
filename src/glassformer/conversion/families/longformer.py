"""Longformer: RoBERTa's layers with a bidirectional window, and global tokens that attend with separate projections:
`LongformerForMaskedLM`, `LongformerModel`, `LongformerForSequenceClassification`. Global tokens are an input
(`model(global_tokens=)`); by default the first one for classification, otherwise none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from glassformer.architectures.bert import POOLER, masked
from glassformer.config import ModelConfig, stack_of
from glassformer.conversion.families.common import read_model
from glassformer.conversion.families.encoders import (
    LAYER,
    encoder_block,
    first_position,
    heads_of,
    labels,
    named,
    refuse_decoders,
    written_behind_padding,
)
from glassformer.conversion.families.roberta import HEAD, UNUSED
from glassformer.conversion.family import Blocked, Family, attention
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import GlobalAttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import LearnedConfig
from glassformer.parts.visibility import LongformerConfig

GLOBAL = " ".join(f"attention.self.{name}_global" for name in ("query", "key", "value"))
LOOKS = {**LAYER, ".mixer.global_maps.qkv": GLOBAL}
CLASSES = {"head.transform.dense": "classifier.dense", "head": "classifier.out_proj"}


def names(config: ModelConfig) -> Names:
    """Returns the names of the modules. The projections of global tokens are listed as `apart`, because the published
    class applies its query projection to global tokens only, ours to all tokens."""
    found = named("longformer", HEAD, UNUSED, LOOKS, classes=CLASSES)(config)
    return replace(found, apart=frozenset({".mixer.global_maps.qkv"}))


def read(fields: Fields) -> ModelConfig:
    refuse_decoders(fields)
    fields.ignore("onnx_export", "attention_mode", "attention_dilation", "autoregressive", "ignore_attention_mask")
    norm = LayerNormConfig(eps=fields.number("layer_norm_eps", 1e-12))
    classes = HeadConfig(pool="cls", transform=POOLER.transform, **labels(fields), bias=True)
    head = heads_of(
        fields,
        {
            "LongformerForMaskedLM": masked(norm), "LongformerModel": POOLER,
            "LongformerForSequenceClassification": classes,
        },
        "LongformerModel",
    )  # fmt: skip
    first, segments = first_position(fields), fields.whole("type_vocab_size", 2)
    context = fields.whole("max_position_embeddings", 512) - first
    block = encoder_block(fields, norm)
    blocks = [
        block.replace(mixer=GlobalAttentionConfig(**{**dict(block.mixer), "visibility": seen}))
        for seen in (
            LongformerConfig(window=window, globals=int(head.classes is not None), causal=False)
            for window in _windows(fields)
        )
    ]
    return read_model(
        fields, context, block, stack=stack_of(blocks),
        embedding=EmbeddingConfig(
            norm=norm, position=LearnedConfig(length=context, offset=first), segments=segments
        ),
        final_norm=None,
    ).replace(head=head)  # fmt: skip


def _windows(fields: Fields) -> list[int]:
    """Returns the attention window of each layer in tokens, from one number or one per layer."""
    said, n_layers = fields.get("attention_window", 512), fields.layers("num_hidden_layers")
    windows = said if isinstance(said, list) else [said] * n_layers
    if len(windows) != n_layers or not all(type(one) is int and one > 0 and one % 2 == 0 for one in windows):
        raise fields.refuse("attention_window", said, f"expected an even number, or {n_layers} of them")
    return windows


def write(config: ModelConfig) -> dict[str, Any]:
    windows = [getattr(attention(block).visibility, "window", None) for block in config.layers()]
    if None in windows:
        raise Blocked({"mixer.visibility": attention(next(config.layers())).visibility.kind})
    return {**written_behind_padding(config, FAMILY.architecture_of(config)), "attention_window": windows}


FAMILY = Family(
    "longformer", "LongformerForMaskedLM", names, read, write,
    others={"vector": "LongformerModel", "classes": "LongformerForSequenceClassification"},
)  # fmt: skip
