"""Qwen3 (2505.09388): queries and keys normalised per head, a head size of its own, base 1e6."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.init import Gpt2InitConfig
from glassformer.parts.mixer import AttentionConfig, QKNormConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.residual import PreConfig


def qwen3(n_layers: int, d_model: int, n_heads: int, hidden: int, tied: bool) -> ModelConfig:
    block = BlockConfig(
        mixer=AttentionConfig(
            n_heads=n_heads,
            n_kv_heads=8,
            head_dim=128,
            position=RotaryConfig(base=1e6),
            qk_norm=QKNormConfig(norm=RMSNormConfig(eps=1e-6), over="head"),
        ),
        ffn=GluConfig(activation="silu", hidden=hidden),
        norm=RMSNormConfig(eps=1e-6),
        residual=PreConfig(),
    )
    return ModelConfig(
        vocab_size=151936,
        d_model=d_model,
        context=40960,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=n_layers, blocks=(block,)),),
        final_norm=RMSNormConfig(eps=1e-6),
        head=HeadConfig(tied=tied),
        init=Gpt2InitConfig(),
    )


def qwen3_0_6b() -> ModelConfig:
    return qwen3(28, 1024, 16, 3072, tied=True)


def qwen3_8b() -> ModelConfig:
    return qwen3(36, 4096, 32, 12288, tied=False)
