"""Falcon (2311.16867): attention and FFN in parallel, no bias on matrices, rotary positions. 7B shares one norm and has
one KV head; 40B has two norms and eight."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.residual import ParallelConfig


def falcon(n_layers: int, d_model: int, n_heads: int, n_kv_heads: int, shared_norm: bool) -> ModelConfig:
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=n_heads, n_kv_heads=n_kv_heads, position=RotaryConfig(base=1e4)),
        ffn=MlpConfig(activation="gelu", bias=False),
        norm=LayerNormConfig(eps=1e-5),
        residual=ParallelConfig(shared_norm=shared_norm),
    )
    return ModelConfig(
        vocab_size=65024,
        d_model=d_model,
        context=2048,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=n_layers, blocks=(block,)),),
        final_norm=LayerNormConfig(eps=1e-5),
        head=HeadConfig(tied=True),
        init=Gpt2InitConfig(),
    )


def falcon_7b() -> ModelConfig:
    return falcon(32, 4544, 71, n_kv_heads=1, shared_norm=True)


def falcon_40b() -> ModelConfig:
    return falcon(60, 8192, 128, n_kv_heads=8, shared_norm=False)
