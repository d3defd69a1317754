"""Mistral 7B v0.1 (2310.06825): LLaMA's wiring with GQA and a sliding window. Mixtral 8x7B (2401.04088): with experts,
and without the window."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import ExpertsConfig, GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.residual import PreConfig
from glassformer.parts.visibility import SlidingWindowConfig


def mistral_7b() -> ModelConfig:
    block = BlockConfig(
        mixer=AttentionConfig(
            n_heads=32,
            n_kv_heads=8,
            position=RotaryConfig(base=1e4),
            visibility=SlidingWindowConfig(window=4096),
        ),
        ffn=GluConfig(activation="silu", hidden=14336),
        norm=RMSNormConfig(eps=1e-5),
        residual=PreConfig(),
    )
    return ModelConfig(
        vocab_size=32000,
        d_model=4096,
        context=32768,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=32, blocks=(block,)),),
        final_norm=RMSNormConfig(eps=1e-5),
        head=HeadConfig(tied=False),
        init=Gpt2InitConfig(),
    )


def mixtral_8x7b() -> ModelConfig:
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=32, n_kv_heads=8, position=RotaryConfig(base=1e6)),
        ffn=ExpertsConfig(n_experts=8, top_k=2, hidden=14336, balance_loss=0.02),
        norm=RMSNormConfig(eps=1e-5),
        residual=PreConfig(),
    )
    return mistral_7b().replace(stack=(Stage(repeat=32, blocks=(block,)),))
