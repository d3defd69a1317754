"""Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Pre-norm, learned positions."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import LearnedConfig
from glassformer.parts.residual import PreConfig


def gpt2(n_layers: int = 12, d_model: int = 768, n_heads: int = 12) -> ModelConfig:
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=n_heads, bias=True),
        ffn=MlpConfig(activation="gelu_tanh", bias=True),
        norm=LayerNormConfig(eps=1e-5),
        residual=PreConfig(),
    )
    return ModelConfig(
        vocab_size=50257,
        d_model=d_model,
        context=1024,
        embedding=EmbeddingConfig(position=LearnedConfig()),
        stack=(Stage(repeat=n_layers, blocks=(block,)),),
        final_norm=LayerNormConfig(eps=1e-5),
        head=HeadConfig(tied=True),
        init=Gpt2InitConfig(),
    )


def gpt2_medium() -> ModelConfig:
    return gpt2(24, 1024, 16)


def gpt2_large() -> ModelConfig:
    return gpt2(36, 1280, 20)


def gpt2_xl() -> ModelConfig:
    return gpt2(48, 1600, 25)
