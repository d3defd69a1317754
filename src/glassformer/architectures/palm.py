"""PaLM (2204.02311): attention and FFN in parallel after one norm, one KV head, heads of 256 at any width, SwiGLU of
four widths, no biases, a tied head whose logits are divided by sqrt(d)."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.residual import ParallelConfig


def palm(n_layers: int, d_model: int, n_heads: int) -> ModelConfig:
    norm = LayerNormConfig(eps=1e-6, bias=False)
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=n_heads, n_kv_heads=1, head_dim=256, position=RotaryConfig(base=1e4)),
        ffn=GluConfig(activation="silu", hidden=4 * d_model),
        norm=norm,
        residual=ParallelConfig(shared_norm=True),
    )
    return ModelConfig(
        vocab_size=256000,
        d_model=d_model,
        context=2048,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=n_layers, blocks=(block,)),),
        final_norm=norm,
        head=HeadConfig(tied=True, scale=d_model**-0.5),
        init=Gpt2InitConfig(),
    )


def palm_8b() -> ModelConfig:
    return palm(32, 4096, 16)


def palm_540b() -> ModelConfig:
    return palm(118, 18432, 48)
