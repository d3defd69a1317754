"""Readers and writers of fields that BERT and its relatives share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families.common import ACTIVATIONS, name_of, read_ffn
from glassformer.conversion.family import Blocked, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig, TransformConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import LearnedConfig
from glassformer.parts.residual import PostConfig
from glassformer.parts.visibility import BidirectionalConfig

TOWER = {
    "embedding": "embeddings.word_embeddings",
    "embedding.position": "embeddings.position_embeddings",
    "embedding.segments": "embeddings.token_type_embeddings",
    "embedding.norm": "embeddings.LayerNorm",
}
LAYER = {
    ".mixer.qkv": "attention.self.query attention.self.key attention.self.value",
    ".mixer.output": "attention.output.dense",
    ".residual.mixer_norm": "attention.output.LayerNorm",
    ".ffn.up_proj": "intermediate.dense",
    ".ffn.down_proj": "output.dense",
    ".residual.ffn_norm": "output.LayerNorm",
}


def named(
    stem: str,
    head: Mapping[str, str],
    ignored: str,
    layer: Mapping[str, str] = LAYER,
    pooler: str = "pooler.dense",
    classes: Mapping[str, str] | None = None,
) -> Callable[[ModelConfig], Names]:
    """Returns a function from a config to the names of its modules. They are bare if the head gives vectors; otherwise
    they follow `stem`, and a pooler is ignored. `head`: names of the token head; `classes`: names of a classification
    head, by default `pooler` and "classifier"; `ignored`: pattern of tensors that hold no weights."""
    classes = classes or {"head.transform.dense": f"{stem}.{pooler}", "head": "classifier"}

    def names(config: ModelConfig) -> Names:
        if config.head.vector:
            modules = {**TOWER, **layer, "head.transform.dense": pooler}
            return Names("encoder.layer.*.", modules, ignored=r"embeddings\.position_ids")
        tower = {ours: f"{stem}.{theirs}" for ours, theirs in TOWER.items()}
        own, unused = classes if config.head.classes else head, rf"{ignored}|{stem}\.pooler\..*"
        return Names(f"{stem}.encoder.layer.*.", {**tower, **layer, **own}, prefix=f"{stem}.", ignored=unused)

    return names


def heads_of(fields: Fields, classes: dict[str, HeadConfig], default: str) -> HeadConfig:
    """Returns the entry of `classes` that the field `architectures` names, or `default` names if the field is absent.
    Raises RequestError for an unknown class."""
    said = fields.get("architectures")
    name = said[0] if isinstance(said, list) and len(said) == 1 else default if said is None else said
    if name not in classes:
        raise fields.refuse("architectures", said, f"known are {', '.join(classes)}")
    return classes[name]


def labels(fields: Fields) -> dict[str, Any]:
    """Returns the number and the names of the classes, as arguments of a `HeadConfig`: two classes by default, as in
    `transformers`, and no names if they are its default ones (LABEL_0)."""
    names = fields.get("id2label")
    if not isinstance(names, dict):
        return {"classes": fields.whole("num_labels", 2)}
    found = tuple(str(names.get(str(i), names.get(i, _made_up(i)))) for i in range(len(names)))
    known = None if found == tuple(map(_made_up, range(len(found)))) else found
    return {"classes": len(found), "labels": known}


def _made_up(number: int) -> str:
    return f"LABEL_{number}"


def encoder_block(fields: Fields, norm: LayerNormConfig) -> BlockConfig:
    return BlockConfig(
        mixer=AttentionConfig(n_heads=fields.whole("num_attention_heads"), bias=True, visibility=BidirectionalConfig()),
        ffn=MlpConfig(**read_ffn(fields, "gelu"), bias=True),
        norm=norm,
        residual=PostConfig(),
    )


def transform(fields: Fields, norm: LayerNormConfig, field: str = "hidden_act") -> TransformConfig:
    """Reads the dense layer before the logits of a masked language model; `field` names its activation, which is also
    that of the layers."""
    return TransformConfig(activation=fields.one_of(field, ACTIVATIONS, "gelu"), norm=norm)


def refuse_decoders(fields: Fields) -> None:
    fields.only("position_embedding_type", "absolute")
    fields.only("is_decoder", False)
    fields.only("tie_word_embeddings", True)
    fields.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "num_labels", "gradient_checkpointing")


def first_position(fields: Fields) -> int:
    """Returns the index of the first position of RoBERTa and its relatives: the row after the padding token's."""
    padding = fields.get("pad_token_id", 1)
    if type(padding) is not int or padding < 0:
        raise fields.refuse("pad_token_id", padding, "expected a token id")
    return padding + 1


def written(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """Returns the fields of config.json for sizes, activation, norm and classes. Raises Blocked for another norm than
    LayerNorm."""
    block = next(config.layers())
    if not isinstance(block.norm, LayerNormConfig):
        raise Blocked({"norm.kind": block.norm.kind})
    return {
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": ffn(block).hidden,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": attention(block).n_heads,
        "hidden_act": name_of(ffn(block)),
        "max_position_embeddings": config.context,
        "type_vocab_size": config.embedding.segments or 1,
        "layer_norm_eps": block.norm.eps,
        "position_embedding_type": "absolute",
        **written_labels(config),
    }


def written_behind_padding(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """Returns the fields of `written` for models whose learned positions follow a padding row. Raises Blocked for other
    positions."""
    position = config.embedding.position
    if not isinstance(position, LearnedConfig) or not position.offset:
        raise Blocked({"embedding.position": getattr(position, "offset", None)})
    return {
        **written(config, architecture),
        "max_position_embeddings": config.context + position.offset,
        "pad_token_id": position.offset - 1,
    }


def written_labels(config: ModelConfig) -> dict[str, Any]:
    if not (n := config.head.classes):
        return {}
    names = config.head.labels or tuple(map(_made_up, range(n)))
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }
