"""Mamba (2312.00752): layers of a selective state space and nothing else, as published in state-spaces/mamba-130m."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import MambaConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.residual import PreConfig


def mamba_130m() -> ModelConfig:
    norm = RMSNormConfig(eps=1e-5)
    block = BlockConfig(mixer=MambaConfig(), ffn=None, norm=norm, residual=PreConfig())
    return ModelConfig(
        vocab_size=50280,
        d_model=768,
        context=2048,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=24, blocks=(block,)),),
        final_norm=norm,
        head=HeadConfig(tied=True),
        init=Gpt2InitConfig(),
    )
