"""Qwen3 (2505.09388): queries and keys normalised per head, a head size independent of the width, rotary base 1e6."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import ExpertsConfig, FFNConfig, GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, QKNormConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.residual import PreConfig


def qwen3(n_layers: int, d_model: int, n_heads: int, ffn: FFNConfig, tied: bool, n_kv_heads: int = 8) -> ModelConfig:
    block = BlockConfig(
        mixer=AttentionConfig(
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=128,
            position=RotaryConfig(base=1e6),
            qk_norm=QKNormConfig(norm=RMSNormConfig(eps=1e-6), over="head"),
        ),
        ffn=ffn,
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
    return qwen3(28, 1024, 16, GluConfig(hidden=3072), tied=True)


def qwen3_8b() -> ModelConfig:
    return qwen3(36, 4096, 32, GluConfig(hidden=12288), tied=False)


def qwen3_30b_a3b() -> ModelConfig:
    experts = ExpertsConfig(n_experts=128, top_k=8, hidden=768, balance_loss=0.001)
    return qwen3(48, 2048, 32, experts, tied=False, n_kv_heads=4)
