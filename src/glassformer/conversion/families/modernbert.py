"""ModernBERT: an encoder with a bidirectional window in two of three layers, each kind with separate rotary positions:
`ModernBertForMaskedLM`, `ModernBertModel`, `ModernBertForSequenceClassification`."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.conversion.families.common import ACTIVATIONS, FULL, SLIDING, layer_types, name_of, read_model
from glassformer.conversion.families.encoders import heads_of, labels, written_labels
from glassformer.conversion.family import Blocked, Family, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names, Part, TensorLayout
from glassformer.conversion.rope import rotary_by_kind, write_scaling
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig, TransformConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.residual import PreConfig
from glassformer.parts.visibility import BidirectionalConfig, LongformerConfig

TOWER = {"embedding": "embeddings.tok_embeddings", "embedding.norm": "embeddings.norm", "final_norm": "final_norm"}
LAYER: dict[str, str | TensorLayout] = {
    ".mixer.qkv": "attn.Wqkv",
    ".mixer.output": "attn.Wo",
    ".ffn.gate_proj": Part("mlp.Wi", 0, 2),
    ".ffn.up_proj": Part("mlp.Wi", 1, 2),
    ".ffn.down_proj": "mlp.Wo",
    ".residual.mixer_norm": "attn_norm",
    ".residual.ffn_norm": "mlp_norm",
}
HEAD = {"head.transform.dense": "head.dense", "head.transform.norm": "head.norm"}
BASES = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
UNUSED = (
    "attention_dropout", "embedding_dropout", "mlp_dropout", "classifier_dropout", "deterministic_flash_attn",
    "sparse_prediction", "sparse_pred_ignore_index", "reference_compile", "repad_logits_with_grad", "cls_token_id",
    "layer_norm_eps", "position_embedding_type", "unpad", "num_labels",
)  # fmt: skip


def names(config: ModelConfig) -> Names:
    if config.head.vector:
        return Names("layers.*.", {**TOWER, **LAYER})
    tower = {ours: f"model.{theirs}" for ours, theirs in TOWER.items()}
    last = {"head": "classifier" if config.head.classes else "decoder"}
    return Names("model.layers.*.", {**tower, **LAYER, **HEAD, **last}, prefix="model.")


def read(fields: Fields) -> ModelConfig:
    fields.ignore(*UNUSED)
    norm = LayerNormConfig(eps=fields.number("norm_eps", 1e-5), bias=fields.flag("norm_bias", False))
    context, n_layers = fields.whole("max_position_embeddings", 8192), fields.layers("num_hidden_layers")
    every = fields.whole("global_attn_every_n_layers", 3)
    kinds = fields.names("layer_types", (SLIDING, FULL), n_layers) or [
        SLIDING if layer % every else FULL for layer in range(n_layers)
    ]
    if (half := fields.whole("local_attention", 128) // 2) == 0 and SLIDING in kinds:
        raise fields.refuse("local_attention", 1, "expected 2 tokens or more")
    positions = rotary_by_kind(fields, context, BASES, BASES)
    seen = {FULL: BidirectionalConfig(), SLIDING: LongformerConfig(window=2 * half, globals=0, causal=False)}
    mixer = AttentionConfig(n_heads=fields.whole("num_attention_heads"), bias=fields.flag("attention_bias", False))
    block = BlockConfig(
        mixer=mixer,
        ffn=GluConfig(
            hidden=fields.whole("intermediate_size"),
            activation=fields.one_of("hidden_activation", ACTIVATIONS, "gelu"),
            bias=fields.flag("mlp_bias", False),
        ),
        norm=norm,
    )
    blocks = [block.replace(mixer=mixer.replace(visibility=seen[kind], position=positions[kind])) for kind in kinds]
    blocks[0] = blocks[0].replace(residual=PreConfig(mixer_normed=False))
    return read_model(
        fields, context, block, stack=stack_of(blocks), embedding=EmbeddingConfig(norm=norm),
        head=_head(fields, norm),
    )  # fmt: skip


def _head(fields: Fields, norm: LayerNormConfig) -> HeadConfig:
    """Returns the head of the class that the field `architectures` names. Heads for vectors and classes are never
    tied."""
    tied = fields.flag("tie_word_embeddings", True)
    transform = TransformConfig(
        activation=fields.one_of("classifier_activation", ACTIVATIONS, "gelu"),
        bias=fields.flag("classifier_bias", False), norm=norm,
    )  # fmt: skip
    how = fields.one_of("classifier_pooling", {"cls": "cls", "mean": "mean"}, "cls")
    masked = HeadConfig(tied=tied, bias=fields.flag("decoder_bias", True), transform=transform)
    classes = HeadConfig(pool=how, transform=transform, **labels(fields), bias=True)
    known = {
        "ModernBertForMaskedLM": masked, "ModernBertModel": HeadConfig(vector=True),
        "ModernBertForSequenceClassification": classes,
    }  # fmt: skip
    return heads_of(fields, known, "ModernBertModel")


def write(config: ModelConfig) -> dict[str, Any]:
    block, head = next(config.layers()), config.head
    if not isinstance(block.norm, LayerNormConfig):
        raise Blocked({"norm.kind": block.norm.kind})
    kinds = layer_types(config)
    of = dict(zip(kinds, map(attention, config.layers()), strict=True))
    said = {
        "architectures": [FAMILY.architecture_of(config)],
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": ffn(block).hidden,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": attention(block).n_heads,
        "attention_bias": attention(block).bias,
        "mlp_bias": getattr(block.ffn, "bias", False),
        "hidden_activation": name_of(ffn(block)),
        "max_position_embeddings": config.context,
        "norm_eps": block.norm.eps,
        "norm_bias": block.norm.bias,
        "layer_types": kinds,
        "local_attention": getattr(of[SLIDING].visibility, "window", 2) if SLIDING in of else 128,
        "decoder_bias": head.bias,
        "classifier_pooling": head.pool or "cls",
        "tie_word_embeddings": head.tied or not head.predicts_tokens,
        **written_labels(config),
    }
    if head.transform is not None:
        said |= {"classifier_bias": head.transform.bias, "classifier_activation": name_of(head.transform)}
    return said | _rope(
        {kind: mixer.position for kind, mixer in of.items() if isinstance(mixer.position, RotaryConfig)}
    )


def _rope(positions: dict[str, RotaryConfig]) -> dict[str, Any]:
    """Returns the fields of each kind's rotary positions: bases in the fields of every release, scalings in those of
    transformers 5."""
    said: dict[str, Any] = {BASES[kind][0]: position.base for kind, position in positions.items()}
    if any(position.scaling for position in positions.values()):
        said["rope_parameters"] = {
            kind: {"rope_theta": one.base, **(write_scaling(one.scaling) if one.scaling else {"rope_type": "default"})}
            for kind, one in positions.items()
        }
    return said


FAMILY = Family(
    "modernbert", "ModernBertForMaskedLM", names, read, write,
    others={"vector": "ModernBertModel", "classes": "ModernBertForSequenceClassification"},
)  # fmt: skip
