"""OLMo 2 (2501.00656): norms after the branches, and QK norms over all heads at once. OLMoE (2409.02060): experts."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import ExpertsConfig, FFNConfig, GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, QKNormConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.residual import PreConfig, ResidualConfig, ResPostConfig


def olmo(
    n_layers: int, d_model: int, n_heads: int, ffn: FFNConfig, residual: ResidualConfig, vocab_size: int, base: float,
    eps: float,
) -> ModelConfig:  # fmt: skip
    norm = RMSNormConfig(eps=eps)
    mixer = AttentionConfig(
        n_heads=n_heads, position=RotaryConfig(base=base), qk_norm=QKNormConfig(norm=norm, over="full")
    )
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        context=4096,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=n_layers, blocks=(BlockConfig(mixer=mixer, ffn=ffn, norm=norm, residual=residual),)),),
        final_norm=norm,
        head=HeadConfig(tied=False),
        init=Gpt2InitConfig(),
    )


def olmo_2_1b() -> ModelConfig:
    return olmo(16, 2048, 16, GluConfig(hidden=8192), ResPostConfig(), vocab_size=100352, base=5e5, eps=1e-6)


def olmo_2_7b() -> ModelConfig:
    return olmo(32, 4096, 32, GluConfig(hidden=11008), ResPostConfig(), vocab_size=100352, base=5e5, eps=1e-6)


def olmoe_1b_7b() -> ModelConfig:
    experts = ExpertsConfig(n_experts=64, top_k=8, hidden=1024, normalised=False, z_loss=1e-3)
    return olmo(16, 2048, 16, experts, PreConfig(), vocab_size=50304, base=1e4, eps=1e-5)
