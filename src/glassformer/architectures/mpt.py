"""MPT-7B (MosaicML 2023): pre-norm, ALiBi, no biases, not even in the norms."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import AlibiConfig
from glassformer.parts.residual import PreConfig


def mpt_7b() -> ModelConfig:
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=32, position=AlibiConfig(max_bias=8)),
        ffn=MlpConfig(activation="gelu", bias=False),
        norm=LayerNormConfig(eps=1e-5, bias=False),
        residual=PreConfig(),
    )
    return ModelConfig(
        vocab_size=50432,
        d_model=4096,
        context=2048,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=32, blocks=(block,)),),
        final_norm=LayerNormConfig(eps=1e-5, bias=False),
        head=HeadConfig(tied=True),
        init=Gpt2InitConfig(),
    )
