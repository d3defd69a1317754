"""Raffel et al. 2020, "Exploring the Limits of Transfer Learning", 1910.10683; v1.1 as in Flan-T5, 2210.11416. Pre-norm
without means, relative biases, scores that are not scaled."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage, TowerConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import FFNConfig, GluConfig, MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, CrossAttentionConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RelativeBiasConfig
from glassformer.parts.visibility import BidirectionalConfig, CausalConfig


def t5_small(
    n_layers: int = 6, d_model: int = 512, n_heads: int = 8, network: FFNConfig | None = None, tied: bool = True
) -> ModelConfig:
    norm = RMSNormConfig(eps=1e-6)
    network = network or MlpConfig(hidden=2048, activation="relu", bias=False)

    def own(both_sides: bool) -> AttentionConfig:
        return AttentionConfig(
            n_heads=n_heads, head_dim=64, scale=1.0, position=RelativeBiasConfig(both_sides=both_sides),
            visibility=BidirectionalConfig() if both_sides else CausalConfig(),
        )  # fmt: skip

    cross = CrossAttentionConfig(n_heads=n_heads, head_dim=64, scale=1.0)
    reads = BlockConfig(mixer=own(True), ffn=network, norm=norm)
    writes = (BlockConfig(mixer=own(False), ffn=None, norm=norm), BlockConfig(mixer=cross, ffn=network, norm=norm))
    return ModelConfig(
        vocab_size=32128,
        d_model=d_model,
        context=512,
        stack=(Stage(repeat=n_layers, blocks=writes),),
        final_norm=norm,
        head=HeadConfig(tied=tied, scale=d_model**-0.5 if tied else None),
        encoder=TowerConfig(
            embedding=EmbeddingConfig(tied=True), stack=(Stage(repeat=n_layers, blocks=(reads,)),), final_norm=norm
        ),
    )


def flan_t5_small() -> ModelConfig:
    return t5_small(8, 512, 6, GluConfig(hidden=1024, activation="gelu_tanh"), tied=False)
