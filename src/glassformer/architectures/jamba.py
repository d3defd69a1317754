"""Jamba (2403.19887): of eight layers one is attention and seven are Mamba, with experts in every second one."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import ExpertsConfig, GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, MambaConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.residual import PreConfig


def jamba_v0_1() -> ModelConfig:
    norm = RMSNormConfig(eps=1e-6)
    mamba, attention = MambaConfig(norm_eps=1e-6), AttentionConfig(n_heads=32, n_kv_heads=8)
    dense = GluConfig(hidden=14336)
    experts = ExpertsConfig(hidden=14336, n_experts=16, top_k=2, normalised=False, balance_loss=0.001)
    blocks = tuple(
        BlockConfig(
            mixer=attention if i == 4 else mamba, ffn=experts if i % 2 else dense, norm=norm, residual=PreConfig()
        )
        for i in range(8)
    )
    return ModelConfig(
        vocab_size=65536,
        d_model=4096,
        context=262144,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=4, blocks=blocks),),
        final_norm=norm,
        head=HeadConfig(tied=False),
        init=Gpt2InitConfig(),
    )
