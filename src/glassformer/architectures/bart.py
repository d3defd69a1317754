"""BART (Lewis et al. 2020, 1910.13461), and the translators of OPUS-MT (Tiedemann & Thottingal 2020): encoder-decoders
with post-norm."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage, TowerConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, CrossAttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import LearnedConfig, SinusoidalConfig
from glassformer.parts.residual import PostConfig
from glassformer.parts.visibility import BidirectionalConfig

NORM = LayerNormConfig(eps=1e-5)


def bart_base(
    n_layers: int = 6,
    d_model: int = 768,
    n_heads: int = 12,
    vocab_size: int = 50265,
    context: int = 1024,
    hidden: int = 3072,
    activation: str = "gelu",
    embedding: EmbeddingConfig | None = None,
) -> ModelConfig:
    embedding = embedding or EmbeddingConfig(norm=NORM, position=LearnedConfig(offset=2))
    network = MlpConfig(hidden=hidden, activation=activation, bias=True)
    reads = AttentionConfig(n_heads=n_heads, bias=True, visibility=BidirectionalConfig())
    cross = CrossAttentionConfig(n_heads=n_heads, bias=True)
    own = BlockConfig(mixer=AttentionConfig(n_heads=n_heads, bias=True), ffn=None, norm=NORM, residual=PostConfig())
    other = BlockConfig(mixer=cross, ffn=network, norm=NORM, residual=PostConfig())
    layer = BlockConfig(mixer=reads, ffn=network, norm=NORM, residual=PostConfig())
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        context=context,
        embedding=embedding,
        stack=(Stage(repeat=n_layers, blocks=(own, other)),),
        final_norm=None,
        head=HeadConfig(tied=True, offset=True),
        encoder=TowerConfig(
            embedding=embedding.replace(tied=True), stack=(Stage(repeat=n_layers, blocks=(layer,)),), final_norm=None
        ),
    )


def bart_large() -> ModelConfig:
    return bart_base(12, 1024, 16, hidden=4096)


def opus_mt() -> ModelConfig:
    """Returns OPUS-MT, English to German; most other pairs of languages differ only in the vocabulary size."""
    embedding = EmbeddingConfig(scale=512**0.5, position=SinusoidalConfig(layout="halves"))
    return bart_base(6, 512, 8, 58101, 512, 2048, "silu", embedding)
