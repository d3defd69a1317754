"""The original transformer (Vaswani et al. 2017, "Attention Is All You Need", 1706.03762): post-norm, sinusoids, one
table for the embeddings of both towers and the head."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage, TowerConfig
from glassformer.parts.core.init import XavierInitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, CrossAttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import SinusoidalConfig
from glassformer.parts.residual import PostConfig
from glassformer.parts.visibility import BidirectionalConfig


def transformer_base(
    d_model: int = 512, hidden: int = 2048, n_heads: int = 8, dropout: float = 0.1, bias: bool = False
) -> ModelConfig:
    """Returns the base model; `bias` is True for biases on the attention's projections, which the authors' code
    lacks."""
    norm, residual = LayerNormConfig(eps=1e-6), PostConfig(dropout=dropout)
    network = MlpConfig(hidden=hidden, activation="relu", bias=True)
    reads = AttentionConfig(n_heads=n_heads, bias=bias, visibility=BidirectionalConfig())
    cross = CrossAttentionConfig(n_heads=n_heads, bias=bias)
    own = BlockConfig(mixer=AttentionConfig(n_heads=n_heads, bias=bias), ffn=None, norm=norm, residual=residual)
    other = BlockConfig(mixer=cross, ffn=network, norm=norm, residual=residual)
    layer = BlockConfig(mixer=reads, ffn=network, norm=norm, residual=residual)
    embedding = EmbeddingConfig(scale=d_model**0.5, position=SinusoidalConfig(), dropout=dropout)
    return ModelConfig(
        vocab_size=37000,
        d_model=d_model,
        context=512,
        embedding=embedding,
        stack=(Stage(repeat=6, blocks=(own, other)),),
        final_norm=None,
        head=HeadConfig(tied=True, smoothing=0.1),
        init=XavierInitConfig(),
        encoder=TowerConfig(
            embedding=embedding.replace(tied=True), stack=(Stage(repeat=6, blocks=(layer,)),), final_norm=None
        ),
    )


def transformer_big() -> ModelConfig:
    return transformer_base(1024, 4096, 16, dropout=0.3)
