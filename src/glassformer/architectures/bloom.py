"""BLOOM (2211.05100): sequential pre-norm blocks, ALiBi, a norm right after the embedding."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import AlibiConfig
from glassformer.parts.residual import PreConfig


def bloom(n_layers: int, d_model: int, n_heads: int) -> ModelConfig:
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=n_heads, bias=True, position=AlibiConfig()),
        ffn=MlpConfig(activation="gelu_tanh", bias=True),
        norm=LayerNormConfig(eps=1e-5),
        residual=PreConfig(),
    )
    return ModelConfig(
        vocab_size=250880,
        d_model=d_model,
        context=2048,
        embedding=EmbeddingConfig(norm=LayerNormConfig(eps=1e-5)),
        stack=(Stage(repeat=n_layers, blocks=(block,)),),
        final_norm=LayerNormConfig(eps=1e-5),
        head=HeadConfig(tied=True),
        init=Gpt2InitConfig(),
    )


def bloom_560m() -> ModelConfig:
    return bloom(24, 1024, 16)


def bloom_7b1() -> ModelConfig:
    return bloom(30, 4096, 32)
