"""Mamba and Mamba-2: each layer is one mixer without an FFN."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import Mamba2Config, MambaConfig, MixerConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.residual import PreConfig


def mamba_130m() -> ModelConfig:
    """Returns Mamba (2312.00752), a selective state space model, as published in state-spaces/mamba-130m."""
    return _layers_of(MambaConfig(), vocab_size=50280)


def mamba2_130m() -> ModelConfig:
    """Returns Mamba-2 (2405.21060), state space duality, as published in state-spaces/mamba2-130m."""
    return _layers_of(Mamba2Config(), vocab_size=50288)


def _layers_of(mixer: MixerConfig, vocab_size: int) -> ModelConfig:
    norm = RMSNormConfig(eps=1e-5)
    block = BlockConfig(mixer=mixer, ffn=None, norm=norm, residual=PreConfig())
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=768,
        context=2048,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=24, blocks=(block,)),),
        final_norm=norm,
        head=HeadConfig(tied=True),
        init=Gpt2InitConfig(),
    )
