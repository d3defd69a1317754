"""Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers". An encoder: post-norm, learned positions
and segments, a norm at the embedding. `bert-base` is the model that gives a vector for a text, `bert-base-mlm` the one
that predicts hidden tokens, with the head of its pre-training."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig, TransformConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import LearnedConfig
from glassformer.parts.residual import PostConfig
from glassformer.parts.visibility import BidirectionalConfig

NORM = LayerNormConfig(eps=1e-12)
POOLER = HeadConfig(pool="cls", transform=TransformConfig(activation="tanh"), vector=True)
"""tanh(W x_0 + b) of the first token."""


def masked(norm: LayerNormConfig, bias: bool = True) -> HeadConfig:
    """The head of masked language models: norm(gelu(W x + b)) E^T + b."""
    return HeadConfig(tied=True, bias=True, transform=TransformConfig(bias=bias, norm=norm))


def bert_base_mlm(
    n_layers: int = 12, d_model: int = 768, n_heads: int = 12, vocab_size: int = 30522, context: int = 512,
    norm: LayerNormConfig = NORM, segments: int | None = 2, offset: int = 0,
) -> ModelConfig:  # fmt: skip
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=n_heads, bias=True, visibility=BidirectionalConfig()),
        ffn=MlpConfig(activation="gelu", bias=True),
        norm=norm,
        residual=PostConfig(),
    )
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        context=context,
        embedding=EmbeddingConfig(norm=norm, position=LearnedConfig(offset=offset), segments=segments),
        stack=(Stage(repeat=n_layers, blocks=(block,)),),
        final_norm=None,
        head=masked(norm),
    )


def bert_base() -> ModelConfig:
    return bert_base_mlm().vary(head=POOLER)


def minilm_l6() -> ModelConfig:
    """all-MiniLM-L6-v2 (Wang et al. 2020, 2002.10957, trained for sentences)."""
    return bert_base_mlm(6, 384).vary(head=POOLER)


def roberta_base() -> ModelConfig:
    """Liu et al. 2019, 1907.11692: positions begin in row 2 of the table."""
    return bert_base_mlm(vocab_size=50265, norm=LayerNormConfig(eps=1e-5), segments=1, offset=2)


def distilbert_base() -> ModelConfig:
    """Sanh et al. 2019, 1910.01108: half of BERT's layers, no segments."""
    return bert_base_mlm(6, segments=None)
