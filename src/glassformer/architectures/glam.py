"""GLaM (Du et al. 2021, 2112.06905): in every other layer two of 64 experts for each token, in the others a gated FFN;
separate relative biases in each layer. Its paper names no norm and no biases."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import ExpertsConfig, FFNConfig, GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import RelativeBiasConfig
from glassformer.parts.residual import PreConfig


def glam() -> ModelConfig:
    """Returns GLaM (64B/64E)."""
    mixer = AttentionConfig(n_heads=128, head_dim=128, position=RelativeBiasConfig(shared=False))
    networks: tuple[FFNConfig, ...] = (
        GluConfig(activation="gelu", hidden=32768),
        ExpertsConfig(n_experts=64, top_k=2, hidden=32768, gated=False, activation="gelu", balance_loss=0.01),
    )
    blocks = tuple(
        BlockConfig(mixer=mixer, ffn=network, norm=LayerNormConfig(), residual=PreConfig()) for network in networks
    )
    return ModelConfig(
        vocab_size=256000,
        d_model=8192,
        context=1024,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=32, blocks=blocks),),
        final_norm=LayerNormConfig(),
        head=HeadConfig(tied=True),
        init=Gpt2InitConfig(),
    )
