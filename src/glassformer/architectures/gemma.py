"""Gemma 2 (2408.00118) and Gemma 3 (2503.19786): four norms a layer, and layers with a window between those without.
Gemma 2 caps its scores and logits; Gemma 3 normalises queries and keys instead, and has two rotary bases."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, QKNormConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.residual import SandwichConfig
from glassformer.parts.visibility import SlidingWindowConfig

NORM = RMSNormConfig(eps=1e-6, unit_offset=True)


def gemma(
    n_layers: int, d_model: int, hidden: int, vocab_size: int, context: int, near: AttentionConfig,
    far: AttentionConfig, every: int, cap: float | None,
) -> ModelConfig:  # fmt: skip
    """Returns a model whose every `every`-th layer has the mixer `far`, the others `near`; `cap` softcaps the logits,
    None without a cap."""
    blocks = [
        BlockConfig(
            mixer=far if (layer + 1) % every == 0 else near,
            ffn=GluConfig(hidden=hidden, activation="gelu_tanh"),
            norm=NORM,
            residual=SandwichConfig(),
        )
        for layer in range(n_layers)
    ]
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        context=context,
        embedding=EmbeddingConfig(scale=d_model**0.5),
        stack=stack_of(blocks),
        final_norm=NORM,
        head=HeadConfig(tied=True, softcap=cap),
        init=Gpt2InitConfig(),
    )


def gemma_2(n_layers: int, d_model: int, hidden: int, n_heads: int, n_kv_heads: int) -> ModelConfig:
    far = AttentionConfig(
        n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=256, scale=256**-0.5, softcap=50.0, position=RotaryConfig()
    )
    near = far.replace(visibility=SlidingWindowConfig(window=4096))
    return gemma(n_layers, d_model, hidden, 256000, 8192, near, far, every=2, cap=30.0)


def gemma_3(n_layers: int, d_model: int, hidden: int) -> ModelConfig:
    far = AttentionConfig(
        n_heads=4, n_kv_heads=1, head_dim=256, scale=256**-0.5, position=RotaryConfig(base=1e6),
        qk_norm=QKNormConfig(norm=NORM),
    )  # fmt: skip
    near = far.replace(visibility=SlidingWindowConfig(window=512), position=RotaryConfig(base=1e4))
    return gemma(n_layers, d_model, hidden, 262144, 32768, near, far, every=6, cap=None)


def gemma_2_2b() -> ModelConfig:
    return gemma_2(26, 2304, 9216, 8, 4)


def gemma_2_9b() -> ModelConfig:
    return gemma_2(42, 3584, 14336, 16, 8)


def gemma_3_270m() -> ModelConfig:
    return gemma_3(18, 640, 2048)


def gemma_3_1b() -> ModelConfig:
    return gemma_3(26, 1152, 6912)
