"""GPT-NeoX-20B (2204.06745) and Pythia (2304.01373): parallel branches with two norms, a quarter of each head
rotated."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import SmallInitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.residual import ParallelConfig


def gpt_neox(n_layers: int, d_model: int, n_heads: int, vocab_size: int, activation: str) -> ModelConfig:
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=n_heads, bias=True, position=RotaryConfig(base=1e4, fraction=0.25)),
        ffn=MlpConfig(activation=activation, bias=True),
        norm=LayerNormConfig(eps=1e-5),
        residual=ParallelConfig(shared_norm=False),
    )
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        context=2048,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=n_layers, blocks=(block,)),),
        final_norm=LayerNormConfig(eps=1e-5),
        head=HeadConfig(tied=False),
        init=SmallInitConfig(),
    )


def gpt_neox_20b() -> ModelConfig:
    return gpt_neox(44, 6144, 64, vocab_size=50432, activation="gelu_tanh")


def pythia_160m() -> ModelConfig:
    return gpt_neox(12, 768, 12, vocab_size=50304, activation="gelu")
