"""ViT (Dosovitskiy et al. 2020, 2010.11929, "An Image is Worth 16x16 Words"): an encoder whose tokens are patches of an
image."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.patches import PatchesConfig
from glassformer.parts.position import LearnedConfig
from glassformer.parts.visibility import BidirectionalConfig


def vit_base() -> ModelConfig:
    """Returns ViT-B/16 with the thousand classes of ImageNet."""
    norm, patches = LayerNormConfig(eps=1e-12), PatchesConfig(size=224, patch=16)
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=12, bias=True, visibility=BidirectionalConfig()),
        ffn=MlpConfig(activation="gelu", bias=True),
        norm=norm,
    )
    return ModelConfig(
        vocab_size=1,
        d_model=768,
        context=patches.tokens,
        embedding=EmbeddingConfig(position=LearnedConfig(), patches=patches),
        stack=(Stage(repeat=12, blocks=(block,)),),
        final_norm=norm,
        head=HeadConfig(pool="cls", classes=1000, bias=True),
    )
