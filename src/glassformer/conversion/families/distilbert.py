"""DistilBERT: `DistilBertForMaskedLM`, and `DistilBertModel`, which returns the hidden states. Its norms have a fixed
eps."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families.common import ACTIVATIONS, name_of, read_model
from glassformer.conversion.families.encoders import heads_of, transform
from glassformer.conversion.family import Family, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import LearnedConfig
from glassformer.parts.residual import PostConfig
from glassformer.parts.visibility import BidirectionalConfig

NORM = LayerNormConfig(eps=1e-12)
TOWER = {
    "embedding": "embeddings.word_embeddings",
    "embedding.position": "embeddings.position_embeddings",
    "embedding.norm": "embeddings.LayerNorm",
}
LAYER = {
    ".mixer.qkv": "attention.q_lin attention.k_lin attention.v_lin",
    ".mixer.output": "attention.out_lin",
    ".residual.mixer_norm": "sa_layer_norm",
    ".ffn.up_proj": "ffn.lin1",
    ".ffn.down_proj": "ffn.lin2",
    ".residual.ffn_norm": "output_layer_norm",
}
HEAD = {"head": "vocab_projector", "head.transform.dense": "vocab_transform", "head.transform.norm": "vocab_layer_norm"}


def names(config: ModelConfig) -> Names:
    if config.head.vector:
        return Names("transformer.layer.*.", {**TOWER, **LAYER})
    tower = {ours: f"distilbert.{theirs}" for ours, theirs in TOWER.items()}
    return Names("distilbert.transformer.layer.*.", {**tower, **LAYER, **HEAD}, prefix="distilbert.")


def read(fields: Fields) -> ModelConfig:
    fields.only("sinusoidal_pos_embds", False)
    fields.only("tie_word_embeddings", True)
    fields.only("tie_weights_", True)
    fields.ignore("qa_dropout", "seq_classif_dropout")
    context = fields.whole("max_position_embeddings", 512)
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=fields.whole("n_heads", 12), bias=True, visibility=BidirectionalConfig()),
        ffn=MlpConfig(
            hidden=fields.whole("hidden_dim", 3072), activation=fields.one_of("activation", ACTIVATIONS, "gelu"),
            bias=True,
        ),
        norm=NORM,
        residual=PostConfig(),
    )  # fmt: skip
    masked = HeadConfig(tied=True, bias=True, transform=transform(fields, NORM, "activation"))
    heads = {"DistilBertForMaskedLM": masked, "DistilBertModel": HeadConfig(vector=True)}
    sizes = {"hidden_size": fields.whole("dim", 768), "num_hidden_layers": fields.whole("n_layers", 6)}
    return read_model(
        fields.changed(sizes), context, block,
        embedding=EmbeddingConfig(norm=NORM, position=LearnedConfig(length=context)),
        final_norm=None,
    ).replace(head=heads_of(fields, heads, "DistilBertModel"))  # fmt: skip


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    return {
        "architectures": [FAMILY.architecture_of(config)],
        "vocab_size": config.vocab_size,
        "dim": config.d_model,
        "hidden_dim": ffn(block).hidden,
        "n_layers": config.n_layers,
        "n_heads": attention(block).n_heads,
        "activation": name_of(ffn(block)),
        "max_position_embeddings": config.context,
        "sinusoidal_pos_embds": False,
    }


FAMILY = Family("distilbert", "DistilBertForMaskedLM", names, read, write, others={"vector": "DistilBertModel"})
