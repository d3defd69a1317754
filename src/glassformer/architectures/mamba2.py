"""Mamba-2 (2405.21060): layers of a state space dual and nothing else, as published in state-spaces/mamba2-130m."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import Mamba2Config
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.residual import PreConfig


def mamba2_130m() -> ModelConfig:
    norm = RMSNormConfig(eps=1e-5)
    block = BlockConfig(mixer=Mamba2Config(), ffn=None, norm=norm, residual=PreConfig())
    return ModelConfig(
        vocab_size=50288,
        d_model=768,
        context=2048,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=24, blocks=(block,)),),
        final_norm=norm,
        head=HeadConfig(tied=True),
        init=Gpt2InitConfig(),
    )
