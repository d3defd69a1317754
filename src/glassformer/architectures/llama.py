"""LLaMA (2302.13971), Llama 2 (2307.09288), Llama 3 and 3.2 (2407.21783); and SmolLM2 (2502.02737), wired alike."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.position.scaling import Llama3ScalingConfig, RotaryScalingConfig
from glassformer.parts.residual import PreConfig
from glassformer.parts.visibility import CausalConfig, SlidingWindowConfig


def llama(
    n_layers: int,
    d_model: int,
    n_heads: int,
    hidden: int,
    n_kv_heads: int | None = None,
    vocab_size: int = 32000,
    context: int = 2048,
    base: float = 1e4,
    eps: float = 1e-5,
    tied: bool = False,
    scaling: RotaryScalingConfig | None = None,
    qkv_bias: bool = False,
    window: int | None = None,
) -> ModelConfig:
    mixer = AttentionConfig(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        bias=qkv_bias,
        out_bias=False if qkv_bias else None,
        position=RotaryConfig(base=base, scaling=scaling),
        visibility=CausalConfig() if window is None else SlidingWindowConfig(window=window),
    )
    block = BlockConfig(
        mixer=mixer,
        ffn=GluConfig(activation="silu", hidden=hidden),
        norm=RMSNormConfig(eps=eps),
        residual=PreConfig(),
    )
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        context=context,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=n_layers, blocks=(block,)),),
        final_norm=RMSNormConfig(eps=eps),
        head=HeadConfig(tied=tied),
        init=Gpt2InitConfig(),
    )


def llama_7b() -> ModelConfig:
    return llama(32, 4096, 32, 11008, eps=1e-6)


def llama_13b() -> ModelConfig:
    return llama(40, 5120, 40, 13824, eps=1e-6)


def llama_2_70b() -> ModelConfig:
    return llama(80, 8192, 64, 28672, n_kv_heads=8, context=4096)


def llama_3_8b() -> ModelConfig:
    return llama(32, 4096, 32, 14336, n_kv_heads=8, vocab_size=128256, context=8192, base=5e5)


def llama_3_2(n_layers: int, d_model: int, n_heads: int) -> ModelConfig:
    """Returns a model of Llama 3.2, with rotary frequencies of 8192 tokens scaled to a longer context."""
    scaling = Llama3ScalingConfig(factor=32.0, original_context=8192)
    return llama(n_layers, d_model, n_heads, 8192, 8, 128256, 131072, base=5e5, tied=True, scaling=scaling)


def llama_3_2_1b() -> ModelConfig:
    return llama_3_2(16, 2048, 32)


def llama_3_2_3b() -> ModelConfig:
    return llama_3_2(28, 3072, 24)


def smollm2_135m() -> ModelConfig:
    return llama(30, 576, 9, 1536, n_kv_heads=3, vocab_size=49152, context=8192, base=1e5, tied=True)


def smollm2_360m() -> ModelConfig:
    return llama(32, 960, 15, 2560, n_kv_heads=5, vocab_size=49152, context=8192, base=1e5, tied=True)


def smollm2_1_7b() -> ModelConfig:
    return llama(24, 2048, 32, 8192, vocab_size=49152, context=8192, base=1.3e5, tied=True)


def phi_3_mini() -> ModelConfig:
    """Returns Phi-3 mini (2404.14219): LLaMA's wiring with a window."""
    return llama(32, 3072, 32, 8192, vocab_size=32064, context=4096, window=2047)
