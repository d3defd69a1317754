"""ViT, whose tokens are patches of an image: `ViTForImageClassification`, and `ViTModel` with its pooler."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families.common import ACTIVATIONS, name_of, read_ffn, read_model
from glassformer.conversion.families.encoders import heads_of, labels, written_labels
from glassformer.conversion.family import Blocked, Family, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Bare, Names, OwnParameter, Stacked, TensorLayout, TensorPiece
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig, TransformConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.patches import PatchesConfig
from glassformer.parts.position import LearnedConfig
from glassformer.parts.visibility import BidirectionalConfig

LAYER = {
    ".mixer.qkv": "attention.attention.query attention.attention.key attention.attention.value",
    ".mixer.output": "attention.output.dense",
    ".ffn.up_proj": "intermediate.dense",
    ".ffn.down_proj": "output.dense",
    ".residual.mixer_norm": "layernorm_before",
    ".residual.ffn_norm": "layernorm_after",
}


OF_CLASS = {
    "encoder.layer.": "layers.",
    "attention.query": "q_proj",
    "attention.key": "k_proj",
    "attention.value": "v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}
"""Part of a name in the file -> its name in the loaded model of `transformers` 5."""


class Batched(Bare):
    """Layout of a tensor without a module that has an additional batch axis of 1 in the published checkpoint."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        return [TensorPiece(self.names[0], (1, *at.shape[-2:]), None, lambda w: w[0])]


class Squares(Stacked):
    """Layout of the patch projection: the published matrix is a convolution's, (d, c, patch, patch), ours (d, c
    patch^2)."""

    def __init__(self, name: str, patches: PatchesConfig):
        super().__init__(name)
        self.shape = (patches.channels, patches.patch, patches.patch)

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        if len(at.shape) == 1:
            return super().pieces(at)
        return [TensorPiece(self.names[0], (at.shape[0], *self.shape), lambda w: w.view(-1, *self.shape))]


def of_class(name: str) -> str:
    for published, loaded in OF_CLASS.items():
        name = name.replace(published, loaded)
    return name


def names(config: ModelConfig) -> Names:
    assert config.embedding.patches is not None
    stem = "" if config.head.vector else "vit."
    tower: dict[str, str | TensorLayout] = {
        "embedding.patches.projection": Squares(
            f"{stem}embeddings.patch_embeddings.projection", config.embedding.patches
        ),
        "embedding.patches.first": Batched(f"{stem}embeddings.cls_token"),
        "embedding.position": Batched(f"{stem}embeddings.position_embeddings"),
        "final_norm": f"{stem}layernorm",
        "head.transform.dense": f"{stem}pooler.dense",
        "head": "classifier",
    }
    unused = r"(vit\.)?(embeddings\.mask_token|pooler\..*)"
    return Names(f"{stem}encoder.layer.*.", {**tower, **LAYER}, prefix=stem, ignored=unused)


def read(fields: Fields) -> ModelConfig:
    fields.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "num_labels", "encoder_stride")
    norm, width = LayerNormConfig(eps=fields.number("layer_norm_eps", 1e-12)), fields.whole("hidden_size")
    patches = PatchesConfig(
        size=_side(fields, "image_size", 224), patch=_side(fields, "patch_size", 16),
        channels=fields.whole("num_channels", 3),
    )  # fmt: skip
    fields.only("pooler_output_size", width)
    pooler = TransformConfig(activation=fields.one_of("pooler_act", {**ACTIVATIONS, "tanh": "tanh"}, "tanh"))
    known = {
        "ViTForImageClassification": HeadConfig(pool="cls", **labels(fields), bias=True),
        "ViTModel": HeadConfig(pool="cls", transform=pooler, vector=True),
    }
    block = BlockConfig(
        mixer=AttentionConfig(
            n_heads=fields.whole("num_attention_heads"), head_dim=fields.whole("head_dim", None),
            bias=fields.flag("qkv_bias", True), out_bias=True, visibility=BidirectionalConfig(),
        ),
        ffn=MlpConfig(**read_ffn(fields, "gelu"), bias=True),
        norm=norm,
    )  # fmt: skip
    return read_model(
        fields.changed({"vocab_size": 1}), patches.tokens, block,
        embedding=EmbeddingConfig(position=LearnedConfig(), patches=patches),
        head=heads_of(fields, known, "ViTModel"),
    )  # fmt: skip


def _side(fields: Fields, name: str, default: int) -> int:
    """Returns the side of a square in pixels from the field `name`, which gives it once or for both axes."""
    said = fields.get(name, default)
    sides = said if isinstance(said, list) else [said] * 2
    if len(sides) != 2 or sides[0] != sides[1] or type(sides[0]) is not int or sides[0] < 1:
        raise fields.refuse(name, said, "expected a positive whole number, the side of a square")
    return sides[0]


def write(config: ModelConfig) -> dict[str, Any]:
    block, patches = next(config.layers()), config.embedding.patches
    if patches is None or not isinstance(block.norm, LayerNormConfig):
        raise Blocked({"embedding.patches": patches, "norm.kind": block.norm.kind})
    return {
        "architectures": [FAMILY.architecture_of(config)],
        "hidden_size": config.d_model,
        "intermediate_size": ffn(block).hidden,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": attention(block).n_heads,
        "head_dim": attention(block).head_dim,
        "hidden_act": name_of(ffn(block)),
        "qkv_bias": attention(block).bias,
        "layer_norm_eps": block.norm.eps,
        "image_size": patches.size,
        "patch_size": patches.patch,
        "num_channels": patches.channels,
        "pooler_act": name_of(config.head.transform) if config.head.transform else "tanh",
        **written_labels(config),
    }


FAMILY = Family(
    "vit", "ViTForImageClassification", names, read, write,
    others={"vector": "ViTModel", "classes": "ViTForImageClassification"},
    of_class=of_class,
)  # fmt: skip
