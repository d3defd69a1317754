"""BigBird: BERT's layers whose tokens attend to some blocks of the text, or to all of it (`original_full`):
`BigBirdForMaskedLM`, `BigBirdModel`, `BigBirdForSequenceClassification`.

The choice of random blocks is ours: the published class draws them from numpy's generator, dependent on the length of
the text, and in evaluation has no random blocks, but counts block 0 once more for each. `as_ours` makes it use our
blocks; it is then the same function."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from glassformer.architectures.bert import POOLER
from glassformer.config import ModelConfig
from glassformer.conversion.families.bert import HEAD, UNUSED
from glassformer.conversion.families.common import read_model
from glassformer.conversion.families.encoders import encoder_block, heads_of, labels, named, transform, written
from glassformer.conversion.family import Family, attention
from glassformer.conversion.fields import Fields
from glassformer.model import Model
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.head import HeadConfig, TransformConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import LearnedConfig
from glassformer.parts.visibility import BidirectionalConfig, BigBirdConfig

CLASSES = {"head.transform.dense": "classifier.dense", "head": "classifier.out_proj"}


def read(fields: Fields) -> ModelConfig:
    fields.only("is_decoder", False)
    fields.only("tie_word_embeddings", True)
    fields.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "num_labels", "position_embedding_type")
    fields.ignore("block_size", "num_random_blocks")  # full attention has no blocks
    norm = LayerNormConfig(eps=fields.number("layer_norm_eps", 1e-12))
    fields = fields.changed({"hidden_act": fields.get("hidden_act", "gelu_new")})
    seen = {
        "original_full": BidirectionalConfig(),
        "block_sparse": BigBirdConfig(
            block=fields.whole("block_size", 64), random=fields.get("num_random_blocks", 3), causal=False
        ),
    }
    block = encoder_block(fields, norm)
    mixer = block.mixer.replace(
        bias=fields.flag("use_bias", True), out_bias=True,
        visibility=fields.one_of("attention_type", seen, "block_sparse"),
    )  # fmt: skip
    known = {
        "BigBirdForMaskedLM": HeadConfig(tied=True, bias=True, transform=transform(fields, norm)),
        "BigBirdModel": POOLER,
        "BigBirdForSequenceClassification": HeadConfig(
            pool="cls", transform=TransformConfig(activation=transform(fields, norm).activation),
            **labels(fields), bias=True,
        ),
    }  # fmt: skip
    known["BigBirdForPreTraining"] = known["BigBirdForMaskedLM"]
    context, width = fields.whole("max_position_embeddings", 4096), fields.whole("hidden_size")
    return read_model(
        fields, context, block.replace(mixer=mixer),
        embedding=EmbeddingConfig(
            norm=norm, position=LearnedConfig(length=context), segments=fields.whole("type_vocab_size", 2),
            scale=width**0.5 if fields.flag("rescale_embeddings", False) else None,
        ),
        final_norm=None,
    ).replace(head=heads_of(fields, known, "BigBirdModel"))  # fmt: skip


def write(config: ModelConfig) -> dict[str, Any]:
    mixer = attention(next(config.layers()))
    said = {
        **written(config, FAMILY.architecture_of(config)),
        "use_bias": mixer.bias,
        "rescale_embeddings": (config.embedding.scale or 1.0) != 1.0,
        "attention_type": "original_full",
    }
    if isinstance(mixer.visibility, BigBirdConfig):
        sparse = {"block_size": mixer.visibility.block, "num_random_blocks": mixer.visibility.random}
        said |= {"attention_type": "block_sparse", **sparse}
    return said


def as_ours(theirs: Any, model: Model) -> None:
    """Makes `theirs`, a published BigBird, attend to the random blocks of our `model`, in training mode without
    dropout."""
    theirs.train()
    theirs.config.attention_probs_dropout_prob = 0.0  # read by the module that it builds for short texts
    sparse = []
    for module in theirs.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "_bigbird_block_rand_mask_with_head"):
            sparse.append(module)
    for module, layer in zip(sparse, model.layers, strict=bool(sparse)):
        mixer: Any = layer.mixer
        _draw(module, mixer.visibility, mixer.n_heads)


def _draw(module: Any, visibility: Any, n_heads: int) -> None:
    def table(length: int) -> torch.Tensor:
        sized, m = visibility.sized(length), length // visibility.block
        near = [{0, i - 1, i, i + 1, m - 1} for i in range(m)]
        return torch.tensor([sorted(sized.row(i, length) - near[i]) for i in range(1, m - 1)])

    module._get_rand_attn_plan = lambda length, *_: ([length], [visibility.random])
    module._bigbird_block_rand_mask_with_head = lambda from_seq_length, **_: [table(from_seq_length).numpy()] * n_heads


FAMILY = Family(
    "big_bird", "BigBirdForMaskedLM", named("bert", HEAD, UNUSED, pooler="pooler", classes=CLASSES), read, write,
    others={"vector": "BigBirdModel", "classes": "BigBirdForSequenceClassification"}, as_ours=as_ours,
)  # fmt: skip
