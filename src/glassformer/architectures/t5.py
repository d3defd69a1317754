"""T5 (Raffel et al. 2020, "Exploring the Limits of Transfer Learning", 1910.10683), v1.1 as in Flan-T5 (2210.11416):
pre-norm without means, relative biases, unscaled scores. And Switch Transformers (Fedus et al. 2021, 2101.03961)."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage, TowerConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import ExpertsConfig, FFNConfig, GluConfig, MlpConfig
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


def switch_base() -> ModelConfig:
    """Returns switch-base-8: T5 of 12 layers with one of eight experts for each token in every other layer."""
    config = t5_small(12, 768, 12, MlpConfig(hidden=3072, activation="relu", bias=False))
    experts = ExpertsConfig(
        n_experts=8, top_k=1, hidden=3072, gated=False, activation="relu", normalised=False, balance_loss=0.01
    )

    def every_other(tower: TowerConfig) -> tuple[Stage, ...]:
        dense = tower.stack[0].blocks
        sparse = tuple(block.replace(ffn=experts) if block.ffn else block for block in dense)
        return (Stage(repeat=6, blocks=(*dense, *sparse)),)

    assert config.encoder is not None
    return config.replace(stack=every_other(config), encoder=config.encoder.replace(stack=every_other(config.encoder)))
