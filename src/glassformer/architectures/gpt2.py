"""Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Pre-norm, learned positions. And
nearly alike: GPT (Radford et al. 2018), GPT-3 (Brown et al. 2020, 2005.14165), StarCoder (Li et al. 2023, 2305.06161).
"""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import LearnedConfig
from glassformer.parts.residual import PostConfig, PreConfig


def gpt2(
    n_layers: int = 12, d_model: int = 768, n_heads: int = 12, n_kv_heads: int | None = None,
    vocab_size: int = 50257, context: int = 1024,
) -> ModelConfig:  # fmt: skip
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=n_heads, n_kv_heads=n_kv_heads, bias=True),
        ffn=MlpConfig(activation="gelu_tanh", bias=True),
        norm=LayerNormConfig(eps=1e-5),
        residual=PreConfig(),
    )
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        context=context,
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


def gpt_1() -> ModelConfig:
    """Returns the first GPT: norms in the stream, after each branch, and no final norm."""
    config = gpt2(vocab_size=40478, context=512)
    stage = config.stack[0]
    block = stage.blocks[0].replace(residual=PostConfig())
    return config.replace(stack=(stage.replace(blocks=(block,)),), final_norm=None)


def gpt_3() -> ModelConfig:
    """Returns GPT-3 175B. Every layer attends to all previous tokens, because the bands of its sparse layers are
    unpublished."""
    return gpt2(96, 12288, 96, context=2048)


def starcoder() -> ModelConfig:
    return gpt2(40, 6144, 48, n_kv_heads=1, vocab_size=49152, context=8192)
