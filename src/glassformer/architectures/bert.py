"""BERT (Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers") and its relatives: encoders with
post-norm, learned positions and segments, and a norm at the embedding. `bert-base` gives a vector for a text,
`bert-base-mlm` predicts hidden tokens with the head of its pre-training."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig, TransformConfig
from glassformer.parts.mixer import AttentionConfig, GlobalAttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import LearnedConfig
from glassformer.parts.residual import PostConfig
from glassformer.parts.visibility import BidirectionalConfig, BigBirdConfig, LongformerConfig

NORM = LayerNormConfig(eps=1e-12)
POOLER = HeadConfig(pool="cls", transform=TransformConfig(activation="tanh"), vector=True)
"""Head that gives tanh(W x_0 + b) of the first token, a vector for each text."""


def masked(norm: LayerNormConfig, bias: bool = True, activation: str = "gelu") -> HeadConfig:
    """Returns the head of masked language models: norm(phi(W x + b)) E^T + b, phi the activation."""
    return HeadConfig(tied=True, bias=True, transform=TransformConfig(bias=bias, norm=norm, activation=activation))


def bert_base_mlm(
    n_layers: int = 12, d_model: int = 768, n_heads: int = 12, vocab_size: int = 30522, context: int = 512,
    norm: LayerNormConfig = NORM, segments: int | None = 2, offset: int = 0, activation: str = "gelu",
) -> ModelConfig:  # fmt: skip
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=n_heads, bias=True, visibility=BidirectionalConfig()),
        ffn=MlpConfig(activation=activation, bias=True),
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
        head=masked(norm, activation=activation),
    )


def bert_base() -> ModelConfig:
    return bert_base_mlm().replace(head=POOLER)


def minilm_l6() -> ModelConfig:
    """Returns all-MiniLM-L6-v2 (Wang et al. 2020, 2002.10957, trained for sentences)."""
    return bert_base_mlm(6, 384).replace(head=POOLER)


def roberta_base() -> ModelConfig:
    """Returns RoBERTa (Liu et al. 2019, 1907.11692), whose positions start in row 2 of their table."""
    return bert_base_mlm(vocab_size=50265, norm=LayerNormConfig(eps=1e-5), segments=1, offset=2)


def distilbert_base() -> ModelConfig:
    """Returns DistilBERT (Sanh et al. 2019, 1910.01108): half of BERT's layers, no segments."""
    return bert_base_mlm(6, segments=None)


def longformer_base() -> ModelConfig:
    """Returns longformer-base-4096 (Beltagy et al. 2020, 2004.05150): RoBERTa with a window of 256 tokens on each side.
    Global tokens are given with the text, and attend with separate projections."""
    seen = LongformerConfig(window=512, globals=0, causal=False)
    return _seeing(roberta_base(), GlobalAttentionConfig(n_heads=12, bias=True, visibility=seen))


def bigbird_base() -> ModelConfig:
    """Returns bigbird-roberta-base (Zaheer et al. 2020, 2007.14062): blocks of 64 tokens, each attending to three
    random ones."""
    seen = BigBirdConfig(block=64, random=3, causal=False)
    model = bert_base_mlm(vocab_size=50358, activation="gelu_tanh")
    return _seeing(model, AttentionConfig(n_heads=12, bias=True, visibility=seen))


def _seeing(config: ModelConfig, mixer: AttentionConfig) -> ModelConfig:
    """Returns the config with this attention in every layer, and 4,096 tokens of context."""
    stage = config.stack[0]
    return config.replace(context=4096, stack=(stage.replace(blocks=(stage.blocks[0].replace(mixer=mixer),)),))
